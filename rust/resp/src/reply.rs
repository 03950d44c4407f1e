//! Replies of a server: [`Reply`], and [`ReplyReader`], which reads them. No length that a server names is allocated
//! before as many bytes have arrived.

use std::io::{self, Read};

use crate::{Error, Result};

/// Longest line: error replies and numbers are short.
const MAX_LINE_BYTES: usize = 64 << 10;
/// Largest value that is read into memory of this crate. Larger ones have a destination of the caller.
const MAX_BULK_BYTES: usize = 16 << 20;
/// Largest value that is skipped: the server's own limit of a value by default.
const MAX_SKIPPED_BYTES: u64 = 512 << 20;
const MAX_ELEMENTS: usize = 1 << 20;
const MAX_DEPTH: usize = 8;
/// Bytes that are read ahead of a header, and so copied if a value follows.
const READ_AHEAD_BYTES: usize = 16 << 10;

/// A reply of RESP2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// A status such as `OK`.
    Status(Vec<u8>),
    /// An error, which begins with its kind.
    Error(String),
    /// A number.
    Integer(i64),
    /// Bytes.
    Bulk(Vec<u8>),
    /// No value.
    Nil,
    /// Several replies.
    Array(Vec<Self>),
}

/// The beginning of the reply to a GET.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ValueHeader {
    Bytes(u64),
    Missing,
    Error(String),
}

/// Reads replies from a stream.
#[derive(Debug)]
pub(crate) struct ReplyReader<R> {
    stream: R,
    ahead: Box<[u8]>,
    start: usize,
    end: usize,
}

impl<R: Read> ReplyReader<R> {
    pub(crate) fn new(stream: R) -> Self {
        Self {
            stream,
            ahead: vec![0; READ_AHEAD_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
        }
    }

    pub(crate) fn stream(&self) -> &R {
        &self.stream
    }

    pub(crate) fn stream_mut(&mut self) -> &mut R {
        &mut self.stream
    }

    /// True if bytes were read that belong to the next reply.
    pub(crate) fn has_bytes(&self) -> bool {
        self.start < self.end
    }

    /// Reads a whole reply.
    pub(crate) fn read_reply(&mut self) -> Result<Reply> {
        self.read_nested(0)
    }

    fn read_nested(&mut self, depth: usize) -> Result<Reply> {
        let line = self.read_line()?;
        let (&kind, rest) = line
            .split_first()
            .ok_or_else(|| protocol("an empty line"))?;
        match kind {
            b'+' => Ok(Reply::Status(rest.to_vec())),
            b'-' => Ok(Reply::Error(text(rest))),
            b':' => Ok(Reply::Integer(number(rest)?)),
            b'$' => match length(rest, MAX_BULK_BYTES)? {
                None => Ok(Reply::Nil),
                Some(len) => self.read_bulk(len).map(Reply::Bulk),
            },
            b'*' if depth < MAX_DEPTH => match length(rest, MAX_ELEMENTS)? {
                None => Ok(Reply::Nil),
                Some(len) => {
                    let replies = (0..len).map(|_| self.read_nested(depth + 1));
                    replies.collect::<Result<_>>().map(Reply::Array)
                }
            },
            _ => Err(protocol(&format!("a reply that begins {:?}", text(&line)))),
        }
    }

    /// Reads the header of a value. Its bytes follow: [`read_value`](Self::read_value) or [`skip`](Self::skip).
    pub(crate) fn read_value_header(&mut self) -> Result<ValueHeader> {
        let line = self.read_line()?;
        match line.split_first() {
            Some((b'$', b"-1")) => Ok(ValueHeader::Missing),
            Some((b'$', rest)) => u64::try_from(number(rest)?)
                .map(ValueHeader::Bytes)
                .map_err(|_| protocol("a negative length")),
            Some((b'-', rest)) => Ok(ValueHeader::Error(text(rest))),
            _ => Err(protocol(&format!("{:?} in place of a value", text(&line)))),
        }
    }

    /// Reads the bytes of a value into the caller's memory.
    pub(crate) fn read_value(&mut self, out: &mut [u8]) -> Result<()> {
        let num_ahead = out.len().min(self.end - self.start);
        let (copied, rest) = out.split_at_mut(num_ahead);
        copied.copy_from_slice(&self.ahead[self.start..self.start + num_ahead]);
        self.start += num_ahead;
        self.stream.read_exact(rest).map_err(|error| lost(&error))?;
        self.read_end()
    }

    /// Reads and drops the bytes of a value.
    pub(crate) fn skip(&mut self, num_bytes: u64) -> Result<()> {
        if num_bytes > MAX_SKIPPED_BYTES {
            return Err(protocol(&format!("a value of {num_bytes} bytes")));
        }
        let mut left = num_bytes;
        while left > 0 {
            if self.start == self.end {
                self.fill()?;
            }
            let num_skipped = left.min((self.end - self.start) as u64);
            self.start += num_skipped as usize;
            left -= num_skipped;
        }
        self.read_end()
    }

    fn read_bulk(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while bytes.len() < len {
            if self.start == self.end {
                self.fill()?;
            }
            let num_bytes = (len - bytes.len()).min(self.end - self.start);
            bytes.extend_from_slice(&self.ahead[self.start..self.start + num_bytes]);
            self.start += num_bytes;
        }
        self.read_end()?;
        Ok(bytes)
    }

    fn read_end(&mut self) -> Result<()> {
        if self.read_line()?.is_empty() {
            return Ok(());
        }
        Err(protocol("a value that is longer than its length"))
    }

    fn read_line(&mut self) -> Result<Vec<u8>> {
        let mut line = Vec::new();
        loop {
            let unread = &self.ahead[self.start..self.end];
            let newline = unread.iter().position(|&byte| byte == b'\n');
            let num_bytes = newline.map_or(unread.len(), |at| at + 1);
            line.extend_from_slice(&unread[..num_bytes]);
            self.start += num_bytes;
            if line.len() > MAX_LINE_BYTES {
                return Err(protocol("a line without an end"));
            }
            if newline.is_some() {
                let Some(without_end) = line.strip_suffix(b"\r\n") else {
                    return Err(protocol("a line that ends without CR"));
                };
                line.truncate(without_end.len());
                return Ok(line);
            }
            self.fill()?;
        }
    }

    fn fill(&mut self) -> Result<()> {
        self.start = 0;
        self.end = 0;
        self.end = self
            .stream
            .read(&mut self.ahead)
            .map_err(|error| lost(&error))?;
        if self.end == 0 {
            return Err(lost(&io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(())
    }
}

/// A length, unless it is -1, which stands for no value.
fn length(text: &[u8], limit: usize) -> Result<Option<usize>> {
    let len = number(text)?;
    if len == -1 {
        return Ok(None);
    }
    match usize::try_from(len) {
        Ok(len) if len <= limit => Ok(Some(len)),
        _ => Err(protocol(&format!("a length of {len}, over {limit}"))),
    }
}

fn number(digits: &[u8]) -> Result<i64> {
    let parsed = std::str::from_utf8(digits)
        .ok()
        .and_then(|text| text.parse().ok());
    parsed.ok_or_else(|| protocol(&format!("{:?} in place of a number", text(digits))))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn protocol(what: &str) -> Error {
    Error::Protocol(format!("the server sent {what}"))
}

/// The error for a failure of the socket.
pub(crate) fn lost(error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            Error::Timeout("the server did not answer in time".to_owned())
        }
        io::ErrorKind::UnexpectedEof => Error::Lost("the server closed the connection".to_owned()),
        _ => Error::Lost(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that gives one byte at a time, so that every place is an end of a read.
    struct Dripping<'a>(&'a [u8]);

    impl Read for Dripping<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let len = out.len().min(1);
            self.0.read(&mut out[..len])
        }
    }

    fn read(bytes: &[u8]) -> Result<Reply> {
        let at_once = ReplyReader::new(bytes).read_reply();
        assert_eq!(ReplyReader::new(Dripping(bytes)).read_reply(), at_once);
        at_once
    }

    #[test]
    fn replies_of_each_type_are_read() {
        assert_eq!(read(b"+OK\r\n"), Ok(Reply::Status(b"OK".to_vec())));
        assert_eq!(read(b"-ERR no\r\n"), Ok(Reply::Error("ERR no".to_owned())));
        assert_eq!(read(b":-7\r\n"), Ok(Reply::Integer(-7)));
        assert_eq!(read(b"$3\r\na\nb\r\n"), Ok(Reply::Bulk(b"a\nb".to_vec())));
        assert_eq!(read(b"$-1\r\n"), Ok(Reply::Nil));
        assert_eq!(read(b"*-1\r\n"), Ok(Reply::Nil));
        assert_eq!(
            read(b"*2\r\n:1\r\n*1\r\n$0\r\n\r\n"),
            Ok(Reply::Array(vec![
                Reply::Integer(1),
                Reply::Array(vec![Reply::Bulk(Vec::new())])
            ]))
        );
    }

    #[test]
    fn hostile_replies_are_errors() {
        for bytes in [
            &b"$9223372036854775807\r\n"[..],
            b"$16777217\r\n",
            b"$99999999999999999999999\r\n",
            b"$-2\r\n",
            b"*1048577\r\n",
            b"*-2\r\n",
            b"$x\r\n",
            b":\r\n",
            b"\r\n",
            b"+OK\n",
            b"%1\r\n",
            b"HTTP/1.1 400\r\n",
            b"$1\r\nabc\r\n",
        ] {
            assert!(matches!(read(bytes), Err(Error::Protocol(_))), "{bytes:?}");
        }
        let endless = vec![b'+'; MAX_LINE_BYTES + 2];
        assert!(matches!(read(&endless), Err(Error::Protocol(_))));
        let deep = b"*1\r\n".repeat(MAX_DEPTH + 1);
        assert!(matches!(read(&deep), Err(Error::Protocol(_))));
    }

    #[test]
    fn truncated_replies_are_lost_connections_at_every_byte() {
        let whole = b"*3\r\n$3\r\nabc\r\n:12\r\n+OK\r\n";
        assert!(read(whole).is_ok());
        for end in 0..whole.len() {
            assert!(matches!(read(&whole[..end]), Err(Error::Lost(_))), "{end}");
        }
    }

    #[test]
    fn values_are_read_into_memory_of_the_caller_or_skipped() {
        let bytes = b"$5\r\nhello\r\n$5\r\nworld\r\n$-1\r\n-LOADING soon\r\n";
        let mut reader = ReplyReader::new(Dripping(bytes));
        let mut out = [0; 5];
        assert_eq!(reader.read_value_header(), Ok(ValueHeader::Bytes(5)));
        reader.read_value(&mut out).unwrap();
        assert_eq!(&out, b"hello");
        assert_eq!(reader.read_value_header(), Ok(ValueHeader::Bytes(5)));
        reader.skip(5).unwrap();
        assert_eq!(reader.read_value_header(), Ok(ValueHeader::Missing));
        let error = ValueHeader::Error("LOADING soon".to_owned());
        assert_eq!(reader.read_value_header(), Ok(error));
    }

    #[test]
    fn values_of_another_type_or_size_are_errors() {
        for bytes in [&b":5\r\n"[..], b"*1\r\n", b"$-5\r\n", b"+OK\r\n"] {
            let header = ReplyReader::new(bytes).read_value_header();
            assert!(matches!(header, Err(Error::Protocol(_))), "{bytes:?}");
        }
        let mut reader = ReplyReader::new(&b"hello+OK\r\n"[..]);
        let read = reader.read_value(&mut [0; 5]);
        assert!(matches!(read, Err(Error::Protocol(_))));
        let mut reader = ReplyReader::new(&b""[..]);
        assert!(matches!(reader.skip(u64::MAX), Err(Error::Protocol(_))));
    }
}
