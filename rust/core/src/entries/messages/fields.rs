//! Fields of the messages: keys, queries, records, bytes, bits, pages.

use std::borrow::Cow;
use std::time::Duration;

use super::super::content::PARTS_CAP;
use super::super::state::{Access, Listed, PAGE_ENTRIES, Query, TOKEN_BYTES};
use super::super::{INLINE_CAP, KEY_CAP, KEYS_CAP, RECORD_CAP, TOKENS_CAP};
use super::{Carried, Page};
use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};
use crate::net::fields::{read_timeout, write_timeout};

const OPEN: u8 = 0;
const LEASE: u8 = 1;
const EXACT: u8 = 0;
const OLDEST: u8 = 1;
const LONGEST_PREFIX: u8 = 2;

pub(super) fn read_key<'a>(reader: &mut Reader<'a>, cap: usize) -> Result<Cow<'a, [u8]>> {
    let key = reader.bytes(cap)?;
    if key.is_empty() {
        return Err(Error::protocol("an empty key"));
    }
    Ok(key.into())
}

pub(super) fn write_query(query: &Query<Cow<'_, [u8]>>) -> Writer {
    match query {
        Query::Exact(key) => Writer::new(EXACT).bytes(key),
        Query::Oldest => Writer::new(OLDEST),
        Query::LongestPrefix(tokens) => Writer::new(LONGEST_PREFIX).bytes(tokens),
    }
}

pub(super) fn read_query<'a>(reader: &mut Reader<'a>) -> Result<Query<Cow<'a, [u8]>>> {
    match reader.u8()? {
        EXACT => read_key(reader, KEY_CAP).map(Query::Exact),
        OLDEST => Ok(Query::Oldest),
        LONGEST_PREFIX => {
            let tokens = read_key(reader, TOKENS_CAP * TOKEN_BYTES)?;
            check_tokens(&tokens)?;
            Ok(Query::LongestPrefix(tokens))
        }
        other => Err(Error::protocol(format_args!("query {other}"))),
    }
}

/// # Errors
/// `Protocol`: these are no whole tokens.
pub(in super::super) fn check_tokens(key: &[u8]) -> Result<()> {
    if key.len().is_multiple_of(TOKEN_BYTES) {
        return Ok(());
    }
    Err(Error::protocol(format_args!(
        "{} bytes of tokens",
        key.len()
    )))
}

pub(super) fn write_access(writer: Writer, access: Access) -> Writer {
    match access {
        Access::Open => writer.u8(OPEN),
        Access::Lease(lease) => write_timeout(writer.u8(LEASE), lease),
    }
}

pub(super) fn read_access(reader: &mut Reader<'_>) -> Result<Access> {
    match reader.u8()? {
        OPEN => Ok(Access::Open),
        LEASE => read_timeout(reader).map(Access::Lease),
        other => Err(Error::protocol(format_args!("access {other}"))),
    }
}

pub(super) fn write_parts(writer: Writer, parts: &[Carried<'_>]) -> Writer {
    writer.list(parts, |writer, part| part.write(writer))
}

/// Reads parts of which [`INLINE_CAP`] bytes may be in the message together.
pub(super) fn read_parts<'a>(reader: &mut Reader<'a>) -> Result<Vec<Carried<'a>>> {
    let mut space = INLINE_CAP;
    reader.list(PARTS_CAP, |reader| {
        let part = Carried::read(reader, space)?;
        if let Carried::Inline(bytes) = &part {
            space -= bytes.len();
        }
        Ok(part)
    })
}

pub(super) fn read_record<'a>(reader: &mut Reader<'a>) -> Result<Cow<'a, [u8]>> {
    reader.bytes(RECORD_CAP).map(Cow::Borrowed)
}

pub(super) fn read_lease(reader: &mut Reader<'_>) -> Result<Duration> {
    read_timeout(reader)?.ok_or_else(|| Error::protocol("a lease without end"))
}

pub(super) fn write_keys(keys: &[Cow<'_, [u8]>]) -> Writer {
    Writer::default().list(keys, |writer, key| writer.bytes(key))
}

pub(super) fn read_keys<'a>(reader: &mut Reader<'a>) -> Result<Vec<Cow<'a, [u8]>>> {
    reader.list(KEYS_CAP, |reader| read_key(reader, KEY_CAP))
}

/// A number of bits, then the bits, the lowest of each byte first.
pub(super) fn write_bits(bits: &[bool]) -> Writer {
    let mut packed = vec![0; bits.len().div_ceil(8)];
    for (at, _) in bits.iter().enumerate().filter(|(_, bit)| **bit) {
        packed[at / 8] |= 1 << (at % 8);
    }
    Writer::default().u32(bits.len() as u32).raw(&packed)
}

pub(super) fn read_bits(reader: &mut Reader<'_>) -> Result<Vec<bool>> {
    let len = reader.u32()? as usize;
    if len > KEYS_CAP {
        let text = format_args!("{len} bits, at most {KEYS_CAP} are allowed");
        return Err(Error::protocol(text));
    }
    let packed = reader.raw(len.div_ceil(8))?;
    let bit = |at: usize| packed[at / 8] & 1 << (at % 8) != 0;
    let is_padded = (len..packed.len() * 8).any(bit);
    if is_padded {
        return Err(Error::protocol("bits behind the last one"));
    }
    Ok((0..len).map(bit).collect())
}

pub(super) fn write_page(page: &Page) -> Writer {
    let writer = Writer::default().u64(page.next.unwrap_or_default());
    writer.list(&page.values, |writer, value| {
        let writer = writer.bytes(&value.key).u64(value.num_bytes);
        writer.u8(value.is_leased.into())
    })
}

pub(super) fn read_page(reader: &mut Reader<'_>) -> Result<Page> {
    let next = reader.u64()?;
    let values = reader.list(PAGE_ENTRIES, |reader| {
        Ok(Listed {
            key: (*read_key(reader, KEY_CAP)?).into(),
            num_bytes: reader.u64()?,
            is_leased: reader.flag()?,
        })
    })?;
    let next = (next != 0).then_some(next);
    Ok(Page { values, next })
}
