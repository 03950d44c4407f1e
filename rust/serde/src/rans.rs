//! Entropy coding of symbols below [`NUM_SYMBOLS`] with one static table: range ANS in eight interleaved lanes, so that the
//! processor works on eight symbols at once. After Duda, "Asymmetric numeral systems", 2013, and Giesen, "Interleaved
//! entropy coders", 2014.
//!
//! These loops are no kernels: compiled for AVX-512, LLVM moves states between vectors and scalars, at half the speed.
//!
//! A lane's state is a `u32` of at least 2^16 that moves 16 bits at a time; frequencies sum to 2^12.

use crate::Result;
use crate::stream::corrupt;

/// Symbols that a table can have.
pub(crate) const NUM_SYMBOLS: usize = 31;
/// Symbols that are coded at once: their number is a multiple.
pub(crate) const LANES: usize = 8;
const BITS: u32 = 12;
const TOTAL: u32 = 1 << BITS;
const LEAST_STATE: u32 = 1 << 16;

/// Frequencies of symbols, which sum to 2^12.
pub(crate) type Frequencies = [u16; NUM_SYMBOLS];

/// Frequency of each symbol, scaled. Each symbol that occurs has one above zero.
pub(crate) fn frequencies(symbols: &[u8]) -> Frequencies {
    // Four counters a symbol: increments of the same one would wait for each other.
    let mut counts = [[0u64; 32]; 4];
    for four in symbols.as_chunks::<4>().0 {
        for (counts, symbol) in counts.iter_mut().zip(four) {
            counts[usize::from(symbol & 31)] += 1;
        }
    }
    let num_symbols = (symbols.len() as u64).max(1);
    let mut scaled = [0u16; NUM_SYMBOLS];
    let mut left = i64::from(TOTAL);
    for (symbol, frequency) in scaled.iter_mut().enumerate() {
        let count: u64 = counts.iter().map(|counts| counts[symbol]).sum();
        if count > 0 {
            let share = (count * u64::from(TOTAL) + num_symbols / 2) / num_symbols;
            *frequency = share.max(1) as u16;
            left -= i64::from(*frequency);
        }
    }
    // The largest is at least 2^12 / 31, and what is left no more than one for each symbol.
    if let Some(largest) = scaled.iter_mut().max() {
        *largest = u16::try_from(i64::from(*largest) + left).unwrap_or(0);
    }
    scaled
}

/// One symbol, for the encoder.
#[derive(Clone, Copy, Default)]
struct Entry {
    /// 2^44 / frequency, rounded up: exact division of all states that occur, which are below frequency * 2^20.
    reciprocal: u64,
    frequency: u32,
    start: u32,
}

/// Words of coded symbols, and the states that the decoder begins with.
pub(crate) struct Coded<'a> {
    pub(crate) words: &'a [u16],
    pub(crate) states: [u32; LANES],
}

/// Codes symbols that `frequencies` were made of. `words` is overwritten.
pub(crate) fn encode<'a>(
    symbols: &[u8],
    frequencies: &Frequencies,
    words: &'a mut Vec<u16>,
) -> Coded<'a> {
    let mut entries = [Entry::default(); 32];
    let mut start = 0;
    for (entry, &frequency) in entries.iter_mut().zip(frequencies) {
        let frequency = u32::from(frequency);
        *entry = Entry {
            reciprocal: (1u64 << 44).div_ceil(u64::from(frequency.max(1))),
            frequency,
            start,
        };
        start += frequency;
    }
    // A symbol makes one word at most, and a window of words is open below the last one.
    words.resize(symbols.len() + LANES, 0);
    let mut states = [LEAST_STATE; LANES];
    let mut begin = words.len();
    for group in symbols.as_chunks::<LANES>().0.iter().rev() {
        let Some(window) = words[..begin].last_chunk_mut::<LANES>() else {
            break;
        };
        let mut free = LANES;
        for lane in (0..LANES).rev() {
            let entry = entries[usize::from(group[lane] & 31)];
            let state = states[lane];
            window[free.wrapping_sub(1) % LANES] = state as u16;
            let is_full = state >> (32 - BITS) >= entry.frequency;
            free -= usize::from(is_full);
            let state = if is_full { state >> 16 } else { state };
            let quotient = ((u64::from(state) * entry.reciprocal) >> 44) as u32;
            let rest = state.wrapping_sub(quotient.wrapping_mul(entry.frequency));
            states[lane] = (quotient << BITS)
                .wrapping_add(rest)
                .wrapping_add(entry.start);
        }
        begin -= LANES - free;
    }
    Coded {
        words: &words[begin..],
        states,
    }
}

/// Decodes symbols in the order in which they were encoded.
pub(crate) struct Decoder<'a> {
    /// Of each remainder of a state: symbol, frequency and offset in its range, in 7, 13 and 12 bits.
    slots: Box<[u32; TOTAL as usize]>,
    states: [u32; LANES],
    /// Those to come, and `LANES` more.
    words: &'a [u16],
}

impl<'a> Decoder<'a> {
    /// Prepares to decode.
    ///
    /// # Errors
    /// `Corrupt`: the frequencies are none.
    pub(crate) fn new(
        frequencies: &Frequencies,
        states: [u32; LANES],
        words: &'a [u16],
    ) -> Result<Self> {
        let sum: u32 = frequencies.iter().map(|&each| u32::from(each)).sum();
        if sum != TOTAL {
            return corrupt("its table of frequencies is none");
        }
        let mut slots = Box::new([0; TOTAL as usize]);
        let mut left = &mut slots[..];
        for (symbol, &frequency) in (0u32..).zip(frequencies) {
            let (mine, rest) = left.split_at_mut(usize::from(frequency));
            for (offset, slot) in (0..).zip(mine) {
                *slot = symbol << 25 | u32::from(frequency) << BITS | offset;
            }
            left = rest;
        }
        Ok(Self {
            slots,
            states,
            words,
        })
    }

    /// Decodes the next symbols.
    ///
    /// # Errors
    /// `Corrupt`: the words have come to their end.
    pub(crate) fn decode(&mut self, symbols: &mut [u8]) -> Result<()> {
        let mut states = self.states;
        let mut words = self.words;
        for group in symbols.as_chunks_mut::<LANES>().0 {
            let Some(window) = words.first_chunk::<LANES>() else {
                return corrupt("its coded symbols end too early");
            };
            let mut used = 0;
            for lane in 0..LANES {
                let state = states[lane];
                let slot = self.slots[(state % TOTAL) as usize];
                group[lane] = (slot >> 25) as u8;
                let frequency = slot >> BITS & 0x1fff;
                let state = frequency
                    .wrapping_mul(state >> BITS)
                    .wrapping_add(slot % TOTAL);
                let refilled = state << 16 | u32::from(window[used % LANES]);
                let is_low = state < LEAST_STATE;
                states[lane] = if is_low { refilled } else { state };
                used += usize::from(is_low);
            }
            words = &words[used..];
        }
        self.states = states;
        self.words = words;
        Ok(())
    }

    /// Checks that the symbols decoded so far are all that were encoded.
    pub(crate) fn finish(self) -> Result<()> {
        if self.states == [LEAST_STATE; LANES] && self.words.len() == LANES {
            return Ok(());
        }
        corrupt("its coded symbols end differently")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn survives(symbols: &[u8]) -> usize {
        let table = frequencies(symbols);
        let sum: u32 = table.iter().map(|&each| u32::from(each)).sum();
        assert_eq!(sum, if symbols.is_empty() { 0 } else { TOTAL });
        let mut scratch = Vec::new();
        let coded = encode(symbols, &table, &mut scratch);
        let words = [coded.words, &[0; LANES]].concat();
        let mut found = vec![99; symbols.len()];
        let mut decoder = Decoder::new(&table, coded.states, &words).unwrap();
        let (first, rest) = found.split_at_mut(symbols.len() / 16 * 8);
        decoder.decode(first).unwrap();
        decoder.decode(rest).unwrap();
        decoder.finish().unwrap();
        assert!(found == symbols);
        coded.words.len()
    }

    #[test]
    fn one_symbol_alone_takes_no_words() {
        assert_eq!(survives(&[7; 8000]), 0);
    }

    #[test]
    fn skewed_symbols_take_about_their_entropy() {
        let symbols: Vec<u8> = (0..80_000u32)
            .map(|at| {
                if at.wrapping_mul(2_654_435_761) >> 28 == 0 {
                    3
                } else {
                    15
                }
            })
            .collect();
        let entropy_bits = 80_000.0 * 0.3373;
        assert!(survives(&symbols) as f64 * 16.0 < entropy_bits * 1.02);
    }

    #[test]
    fn a_decoder_that_has_not_come_to_the_end_is_refused() {
        let symbols: Vec<u8> = (0..800u32).map(|at| (at * at % 31) as u8).collect();
        let table = frequencies(&symbols);
        let mut scratch = Vec::new();
        let coded = encode(&symbols, &table, &mut scratch);
        let finished = |words: &[u16], count: usize| {
            let mut decoder = Decoder::new(&table, coded.states, words).unwrap();
            decoder.decode(&mut vec![0; count])?;
            decoder.finish()
        };
        let words = [coded.words, &[0; LANES]].concat();
        assert!(finished(&words, 800).is_ok());
        assert!(finished(&words, 792).is_err());
        assert!(finished(&[&words[..], &[0]].concat(), 800).is_err());
        assert!(finished(&words[1..], 800).is_err());
    }

    proptest! {
        #[test]
        fn symbols_survive(groups in prop::collection::vec(prop::array::uniform8(0u8..31), 1..200), rare in 1u8..31) {
            let symbols: Vec<u8> = groups.concat();
            survives(&symbols);
            let skewed: Vec<u8> = symbols.iter().map(|symbol| symbol % rare).collect();
            survives(&skewed);
            survives(&[vec![rare; 40_000], symbols].concat());
        }

        #[test]
        fn nonsense_is_refused_or_decoded(
            mut table in prop::array::uniform32(0u16..400),
            states in prop::array::uniform8(any::<u32>()),
            words in prop::collection::vec(any::<u16>(), LANES..300),
        ) {
            let sum: u16 = table[1..NUM_SYMBOLS].iter().sum();
            table[0] = (TOTAL as u16).saturating_sub(sum);
            let mut frequencies = [0; NUM_SYMBOLS];
            frequencies.copy_from_slice(&table[..NUM_SYMBOLS]);
            if let Ok(mut decoder) = Decoder::new(&frequencies, states, &words) {
                let mut symbols = vec![0; 4096];
                if decoder.decode(&mut symbols).is_ok() {
                    let _ = decoder.finish();
                }
                prop_assert!(symbols.iter().all(|&symbol| usize::from(symbol) < NUM_SYMBOLS));
            }
        }
    }
}
