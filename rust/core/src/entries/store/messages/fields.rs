//! Fields that several messages of a store have: keys, records, bits, pages.

use std::borrow::Cow;
use std::time::Duration;

use super::super::{KEY_CAP, KEYS_CAP, RECORD_CAP};
use super::Page;
use crate::entries::state::{Listed, PAGE_ENTRIES};
use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};
use crate::net::fields::read_timeout;

pub(super) fn read_key<'a>(reader: &mut Reader<'a>) -> Result<Cow<'a, [u8]>> {
    let key = reader.bytes(KEY_CAP)?;
    if key.is_empty() {
        return Err(Error::protocol("an empty key"));
    }
    Ok(key.into())
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
    reader.list(KEYS_CAP, read_key)
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
            key: (*read_key(reader)?).into(),
            num_bytes: reader.u64()?,
            is_leased: reader.flag()?,
        })
    })?;
    let next = (next != 0).then_some(next);
    Ok(Page { values, next })
}
