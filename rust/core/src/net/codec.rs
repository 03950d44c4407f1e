//! The binary codec of every message: little-endian integers, and byte strings with a length in front. A length is checked
//! against the bytes that have come before anything is allocated.

use std::time::Duration;

use kvpipe_ucx::SharedBytes;

use crate::error::{Error, Result};

/// Appends values to a message.
#[derive(Debug, Default)]
#[must_use]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Starts a message with its type byte.
    pub fn new(kind: u8) -> Self {
        Self(vec![kind])
    }

    /// Starts a message of about `len` bytes.
    pub fn with_capacity(len: usize) -> Self {
        Self(Vec::with_capacity(len))
    }

    /// Appends one byte.
    pub fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    /// Appends a 16-bit integer.
    pub fn u16(mut self, value: u16) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    /// Appends a 32-bit integer.
    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    /// Appends a 64-bit integer.
    pub fn u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    /// Appends bytes without a length: both sides know it.
    pub fn raw(mut self, value: &[u8]) -> Self {
        self.0.extend_from_slice(value);
        self
    }

    /// Appends a byte string: length, then content.
    pub fn bytes(self, value: &[u8]) -> Self {
        self.u32(value.len() as u32).raw(value)
    }

    /// Appends a byte string that others may change: length, then a copy.
    pub(crate) fn shared(self, value: SharedBytes<'_>) -> Self {
        let mut start = self.u32(value.len() as u32);
        value.append_to(&mut start.0);
        start
    }

    /// Appends a text as UTF-8.
    pub fn str(self, value: &str) -> Self {
        self.bytes(value.as_bytes())
    }

    /// Appends a text for people, cut to `cap` bytes: a reader refuses a longer one.
    pub fn text(self, value: &str, cap: usize) -> Self {
        let mut end = value.len().min(cap);
        while !value.is_char_boundary(end) {
            end -= 1;
        }
        self.str(&value[..end])
    }

    /// Appends a list: number of items, then each.
    pub fn list<T>(self, items: &[T], each: impl FnMut(Self, &T) -> Self) -> Self {
        let start = self.u32(items.len() as u32);
        items.iter().fold(start, each)
    }

    /// The finished message.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Reads the values of a message from a peer; it trusts none of them.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads from the start of `message`.
    pub fn new(message: &'a [u8]) -> Self {
        Self(message)
    }

    /// Reads `len` bytes.
    pub fn raw(&mut self, len: usize) -> Result<&'a [u8]> {
        if len > self.0.len() {
            return Err(Error::protocol(format_args!(
                "message ends early: {len} bytes expected, {} left",
                self.0.len()
            )));
        }
        let (taken, rest) = self.0.split_at(len);
        self.0 = rest;
        Ok(taken)
    }

    /// Reads one byte.
    pub fn u8(&mut self) -> Result<u8> {
        Ok(self.raw(1)?[0])
    }

    /// Reads a flag: a byte that is 0 or 1, so that each message has one encoding.
    pub fn flag(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Error::protocol(format_args!("flag {other}, not 0 or 1"))),
        }
    }

    /// Reads a 16-bit integer.
    pub fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.fixed()?))
    }

    /// Reads a 32-bit integer.
    pub fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.fixed()?))
    }

    /// Reads a 64-bit integer.
    pub fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.fixed()?))
    }

    /// Reads an array of known size.
    pub fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.raw(N)?);
        Ok(out)
    }

    /// Reads a byte string of at most `cap` bytes.
    pub fn bytes(&mut self, cap: usize) -> Result<&'a [u8]> {
        let len = self.u32()? as usize;
        if len > cap {
            return Err(Error::protocol(format_args!(
                "a field of {len} bytes, at most {cap} are allowed"
            )));
        }
        self.raw(len)
    }

    /// Reads a text of at most `cap` bytes.
    pub fn str(&mut self, cap: usize) -> Result<String> {
        let bytes = self.bytes(cap)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| Error::protocol("a text is not UTF-8"))
    }

    /// Reads a list of at most `cap` items. It grows item by item, so that a false length allocates nothing.
    pub fn list<T>(
        &mut self,
        cap: usize,
        mut each: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        let len = self.u32()? as usize;
        if len > cap {
            return Err(Error::protocol(format_args!(
                "a list of {len} items, at most {cap} are allowed"
            )));
        }
        let mut items = Vec::new();
        for _ in 0..len {
            items.push(each(self)?);
        }
        Ok(items)
    }

    /// Ends the message; bytes that are left are an error.
    pub fn end(self) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        Err(Error::protocol(format_args!(
            "{} bytes follow the end of a message",
            self.0.len()
        )))
    }

    /// Reads all bytes that are left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

/// A time on the wire.
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read_back(a: u8, b: u16, c: u32, d: u64, e: Vec<u8>, f: String, g: Vec<u64>) {
            let message = Writer::new(a).u16(b).u32(c).u64(d).bytes(&e).str(&f).list(&g, |w, v| w.u64(*v)).finish();
            let mut reader = Reader::new(&message);
            prop_assert_eq!(reader.u8().unwrap(), a);
            prop_assert_eq!(reader.u16().unwrap(), b);
            prop_assert_eq!(reader.u32().unwrap(), c);
            prop_assert_eq!(reader.u64().unwrap(), d);
            prop_assert_eq!(reader.bytes(1 << 20).unwrap(), &e[..]);
            prop_assert_eq!(reader.str(1 << 20).unwrap(), f);
            prop_assert_eq!(reader.list(1 << 20, Reader::u64).unwrap(), g);
            prop_assert!(reader.end().is_ok());
        }

        #[test]
        fn any_bytes_give_a_value_or_an_error(message: Vec<u8>) {
            let mut reader = Reader::new(&message);
            let _ = reader.list(1 << 30, |r| r.bytes(1 << 30).map(<[u8]>::to_vec));
            let _ = reader.str(1 << 30);
            let _ = reader.end();
        }
    }

    #[test]
    fn a_length_over_the_cap_is_refused_before_allocation() {
        let message = Writer::new(0).u32(u32::MAX).finish();
        let mut reader = Reader::new(&message[1..]);
        let error = reader.bytes(16).unwrap_err();
        assert!(error.to_string().contains("at most 16"), "{error}");
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let message = Writer::default().text("abcé", 4).finish();
        assert_eq!(Reader::new(&message).str(4).unwrap(), "abc");
    }

    #[test]
    fn a_flag_is_0_or_1() {
        assert_eq!(Reader::new(&[0]).flag(), Ok(false));
        assert_eq!(Reader::new(&[1]).flag(), Ok(true));
        assert!(Reader::new(&[2]).flag().is_err());
    }

    #[test]
    fn bytes_after_the_end_are_refused() {
        let reader = Reader::new(b"x");
        assert!(reader.end().is_err());
    }
}
