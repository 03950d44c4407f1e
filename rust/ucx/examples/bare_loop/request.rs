//! Requests: a verb and `key=value` words.

use std::collections::HashMap;

use crate::Result;

/// The role of this process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Starts transfers and measures their time: the destination.
    Active,
    /// The other side.
    Passive,
    /// Copies within its own memory.
    Copy,
}

impl Role {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        match text {
            "active" => Ok(Self::Active),
            "passive" => Ok(Self::Passive),
            "copy" => Ok(Self::Copy),
            _ => Err(format!("role {text:?}: expected active, passive or copy").into()),
        }
    }
}

/// One line.
pub(crate) struct Request {
    pub(crate) verb: String,
    words: HashMap<String, String>,
}

impl Request {
    pub(crate) fn parse(line: &str) -> Result<Self> {
        let mut words = line.split_whitespace();
        let verb = words.next().ok_or("an empty request")?.to_owned();
        let words = words
            .map(|word| word.split_once('=').ok_or(word))
            .map(|pair| pair.map(|(key, value)| (key.to_owned(), value.to_owned())))
            .collect::<std::result::Result<_, _>>()
            .map_err(|word| format!("{word:?}: expected key=value"))?;
        Ok(Self { verb, words })
    }

    pub(crate) fn text(&self, key: &str) -> Result<&str> {
        let value = self.words.get(key).map(String::as_str);
        Ok(value.ok_or_else(|| format!("{} without {key}", self.verb))?)
    }

    pub(crate) fn number(&self, key: &str) -> Result<usize> {
        let text = self.text(key)?;
        Ok(text
            .parse()
            .map_err(|_| format!("{key}={text}: expected a number"))?)
    }

    pub(crate) fn is(&self, key: &str, value: &str) -> bool {
        self.words.get(key).is_some_and(|found| found == value)
    }
}

/// One measurement: `count` times `blocks` pieces of `bytes`, at other offsets in each round.
pub(crate) struct Case {
    pub(crate) bytes: usize,
    pub(crate) blocks: usize,
    pub(crate) is_scattered: bool,
    pub(crate) count: usize,
    pub(crate) round: usize,
}

impl Case {
    pub(crate) fn of(request: &Request) -> Result<Self> {
        Ok(Self {
            bytes: request.number("bytes")?.max(1),
            blocks: request.number("blocks")?.max(1),
            is_scattered: request.is("layout", "scattered"),
            count: request.number("count")?,
            round: request.number("round")?,
        })
    }

    /// The offsets of each transfer's blocks at one side, which `seed` selects.
    pub(crate) fn transfers(&self, total: usize, seed: u64) -> Vec<Vec<usize>> {
        let mut ids: Vec<usize> = (0..total / self.bytes).collect();
        if self.is_scattered {
            shuffle(&mut ids, seed);
        }
        let sets: Vec<&[usize]> = ids.chunks_exact(self.blocks).collect();
        let first = self.round * self.count;
        let chosen =
            (first..first + self.count).filter_map(|i| sets.get(i % sets.len().max(1)).copied());
        chosen
            .map(|set| set.iter().map(|id| id * self.bytes).collect())
            .collect()
    }
}

/// Fisher and Yates, with a linear congruential generator: the same order for the same seed.
fn shuffle(ids: &mut [usize], seed: u64) {
    let mut state = seed;
    for last in (1..ids.len()).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ids.swap(last, (state >> 33) as usize % (last + 1));
    }
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    let words = (0..=len as u64 / 8).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    bytes.truncate(len);
    bytes
}
