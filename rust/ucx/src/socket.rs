//! Bytes between a stream socket and many ranges of memory, with one call of the kernel and without a copy between.

use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{c_void, iovec};

use crate::buffer::{Buffer, MemoryKind};

/// Most ranges of one call: the kernel takes 1,024, of which a few are for what surrounds them.
pub const RANGES_CAP: usize = 1000;

/// Offset and length of a part of a buffer.
pub type Range = (usize, usize);

/// Sends `head`, these ranges of host memory, and `tail`; returns how many bytes the socket has taken.
///
/// # Errors
/// That of the kernel, `WouldBlock` included; `InvalidInput`: a range is not of this buffer, the buffer is not in host
/// memory, or there are too many.
pub fn send(
    socket: BorrowedFd<'_>,
    head: &[u8],
    (buffer, ranges): (&Buffer, &[Range]),
    tail: &[u8],
) -> Result<usize> {
    let mut vectors = Vec::with_capacity(ranges.len() + 2);
    vectors.push(of_bytes(head));
    for range in checked(buffer, ranges)? {
        let start = buffer.range(range.0, range.1);
        vectors.push(vector(start, range.1)?);
    }
    vectors.push(of_bytes(tail));
    // SAFETY: all zero bytes are a message without address, data or control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len() as _;
    // SAFETY: the vectors are memory that is valid for reads while `head`, `buffer` and `tail` are borrowed; the kernel
    // only reads them.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| Error::last_os_error())
}

/// Receives into these ranges of host memory, if any, and at most `rest_cap` bytes after them at the end of `rest`. Returns
/// how many bytes came in all, 0 at the end of the stream.
///
/// # Errors
/// As of [`send`]; `InvalidInput` also for memory that may only be read.
pub fn receive(
    socket: BorrowedFd<'_>,
    into: Option<(&Buffer, &[Range])>,
    rest: &mut Vec<u8>,
    rest_cap: usize,
) -> Result<usize> {
    let mut vectors = Vec::new();
    let mut in_ranges = 0;
    if let Some((buffer, ranges)) = into {
        vectors.reserve(ranges.len() + 1);
        for range in checked(buffer, ranges)? {
            let start = buffer.writable_range(range.0, range.1);
            vectors.push(vector(start, range.1)?);
            in_ranges += range.1;
        }
    }
    rest.reserve(rest_cap);
    vectors.push(iovec {
        iov_base: rest.spare_capacity_mut().as_mut_ptr().cast(),
        iov_len: rest_cap,
    });
    // SAFETY: the vectors are memory that is valid for writes while `buffer` and `rest` are borrowed.
    let received = unsafe {
        libc::readv(
            socket.as_raw_fd(),
            vectors.as_ptr(),
            libc::c_int::try_from(vectors.len()).map_err(|_| ErrorKind::InvalidInput)?,
        )
    };
    let received = usize::try_from(received).map_err(|_| Error::last_os_error())?;
    let len = rest.len() + received.saturating_sub(in_ranges);
    // SAFETY: the kernel has filled the ranges first, then so much of the spare capacity.
    unsafe { rest.set_len(len) };
    Ok(received)
}

/// Has the kernel take no more bytes to send while so many have not left.
///
/// # Errors
/// That of the kernel.
pub fn set_unsent_low_water(socket: BorrowedFd<'_>, num_bytes: u32) -> Result<()> {
    let value = (&raw const num_bytes).cast();
    let len = size_of::<u32>() as libc::socklen_t;
    let (level, option) = (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT);
    // SAFETY: the kernel reads the number.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value, len) };
    if set == 0 {
        return Ok(());
    }
    Err(Error::last_os_error())
}

fn checked<'a>(buffer: &Buffer, ranges: &'a [Range]) -> Result<impl Iterator<Item = &'a Range>> {
    let is_host = buffer.kind() == MemoryKind::Host;
    let are_usable = ranges.is_empty() || (is_host && ranges.len() <= RANGES_CAP);
    are_usable
        .then(|| ranges.iter())
        .ok_or_else(|| ErrorKind::InvalidInput.into())
}

fn vector(start: Option<*mut c_void>, len: usize) -> Result<iovec> {
    Ok(iovec {
        iov_base: start.ok_or(ErrorKind::InvalidInput)?,
        iov_len: len,
    })
}

/// Bytes that are only read.
fn of_bytes(bytes: &[u8]) -> iovec {
    iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn kind(result: Result<usize>) -> ErrorKind {
        result.unwrap_err().kind()
    }

    #[test]
    fn bytes_go_from_ranges_to_ranges_and_what_follows_to_the_rest() {
        let (near, far) = UnixStream::pair().unwrap();
        let from = Buffer::from_vec(b"0123456789".to_vec());
        let sent = send(near.as_fd(), b"head", (&from, &[(8, 2), (0, 3)]), b"tail");
        assert_eq!(sent.unwrap(), 13);
        let (into, mut rest) = (Buffer::zeroed(10), b"rest: ".to_vec());
        let received = receive(far.as_fd(), Some((&into, &[(6, 4), (0, 3)])), &mut rest, 4);
        assert_eq!(received.unwrap(), 11);
        assert_eq!(into.bytes(0, 10).unwrap().to_vec(), b"890\0\0\0head");
        assert_eq!(rest, b"rest: 12ta");
        assert_eq!(receive(far.as_fd(), None, &mut rest, 9).unwrap(), 2);
        assert_eq!(rest, b"rest: 12tail");
    }

    #[test]
    fn a_range_that_must_not_be_read_or_written_is_refused_and_nothing_is_sent() {
        static BYTES: &[u8] = b"kvpipe";
        let (near, far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        let host = Buffer::zeroed(4);
        let invalid = ErrorKind::InvalidInput;
        for ranges in [
            vec![(1, 4)],
            vec![(usize::MAX, 1)],
            vec![(0, 0); RANGES_CAP + 1],
        ] {
            assert_eq!(
                kind(send(near.as_fd(), b"head", (&host, &ranges), b"")),
                invalid
            );
            let received = receive(far.as_fd(), Some((&host, &ranges)), &mut Vec::new(), 0);
            assert_eq!(kind(received), invalid);
        }
        let cuda = MemoryKind::Cuda { device: 0 };
        // SAFETY: never dereferenced, which is what this test is about.
        let device = unsafe { Buffer::from_raw_parts(4096, 4, cuda, Box::new(())) };
        assert_eq!(
            kind(send(near.as_fd(), b"", (&device, &[(0, 4)]), b"")),
            invalid
        );
        let address = BYTES.as_ptr().expose_provenance();
        // SAFETY: a static is valid for reads for ever.
        let fixed = unsafe { Buffer::read_only(address, 6, MemoryKind::Host, Box::new(())) };
        let received = receive(far.as_fd(), Some((&fixed, &[(0, 6)])), &mut Vec::new(), 0);
        assert_eq!(kind(received), invalid);
        let received = receive(far.as_fd(), Some((&host, &[(0, 4)])), &mut Vec::new(), 0);
        assert_eq!(kind(received), ErrorKind::WouldBlock);
    }

    #[test]
    fn a_stream_that_has_ended_gives_no_bytes_and_one_without_a_reader_no_signal() {
        let (near, far) = UnixStream::pair().unwrap();
        drop(far);
        let buffer = Buffer::zeroed(4);
        let received = receive(near.as_fd(), Some((&buffer, &[(0, 4)])), &mut Vec::new(), 0);
        assert_eq!(received.unwrap(), 0);
        let sent = send(near.as_fd(), b"head", (&buffer, &[]), b"");
        assert_eq!(kind(sent), ErrorKind::BrokenPipe);
    }
}
