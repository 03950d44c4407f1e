//! Reads of another process on this machine without UCX: many pieces in one call of `process_vm_readv`, where UCX's CMA
//! makes a call for each. That halves the time for pieces of 4 KiB (docs/benchmarks.md), and changes nothing for 64 KiB.

use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::buffer::{Buffer, MemoryKind};

/// Most pieces of one call, the kernel's limit (`UIO_MAXIOV`).
pub const PIECES_CAP: usize = 1024;

/// One piece to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the destination.
    pub to: usize,
    /// Address in the other process.
    pub from: u64,
    /// Bytes.
    pub len: usize,
}

/// Another process of this machine whose memory this one may read.
#[derive(Debug)]
pub struct ProcessVmReader {
    pid: libc::pid_t,
    process: Process,
}

/// A process. Its pid may belong to another process once it has ended, this descriptor never does.
#[derive(Debug)]
struct Process(OwnedFd);

impl Process {
    fn open(pid: libc::pid_t) -> Result<Self> {
        // SAFETY: takes two numbers.
        let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let fd = i32::try_from(opened).map_err(Error::other)?;
        if fd < 0 {
            return Err(Error::last_os_error());
        }
        // SAFETY: just opened, and owned by nothing else.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// # Errors
    /// It has ended.
    fn check_alive(&self) -> Result<()> {
        let mut poll = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        loop {
            // SAFETY: one entry, ours for the call.
            match unsafe { libc::poll(&raw mut poll, 1, 0) } {
                0 => return Ok(()),
                1.. => return Err(Error::other("the process has ended")),
                _ => match Error::last_os_error() {
                    error if error.kind() == ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
    }
}

impl ProcessVmReader {
    /// The process that claims this pid and `proof` at `address` of its memory. None when it cannot be read (another
    /// machine or namespace, no permission, a kernel before 5.3) or has other bytes there.
    pub fn find(pid: u32, address: u64, proof: &[u8]) -> Option<Self> {
        let pid = libc::pid_t::try_from(pid).ok().filter(|pid| *pid > 0)?;
        let process = Process::open(pid).ok()?;
        let found = Self { pid, process };
        let read = Buffer::zeroed(proof.len());
        let piece = Piece {
            to: 0,
            from: address,
            len: proof.len(),
        };
        found.read(&read, &[piece]).ok()?;
        (read.bytes(0, proof.len())? == *proof).then_some(found)
    }

    /// Reads all pieces into `into`, synchronously.
    ///
    /// # Errors
    /// A piece does not fit, there are too many, or the other process cannot be read there (any more). The destination is
    /// undefined then.
    pub fn read(&self, into: &Buffer, pieces: &[Piece]) -> Result<()> {
        let (mut local, mut remote) = (
            Vec::with_capacity(pieces.len()),
            Vec::with_capacity(pieces.len()),
        );
        for piece in pieces {
            let range = into.writable_range(piece.to, piece.len);
            let start = range.filter(|_| into.kind() == MemoryKind::Host);
            local.push(libc::iovec {
                iov_base: start.ok_or(ErrorKind::InvalidInput)?,
                iov_len: piece.len,
            });
            let from = usize::try_from(piece.from).map_err(|_| ErrorKind::InvalidInput)?;
            remote.push(libc::iovec {
                iov_base: std::ptr::without_provenance_mut(from),
                iov_len: piece.len,
            });
        }
        let expected: usize = pieces.iter().map(|piece| piece.len).sum();
        // SAFETY: each local range lies in `into`, which is host memory, valid for writes while it is borrowed; the
        // kernel checks the remote ranges and only reads them, even if a peer has claimed the pid of this process.
        let read = unsafe {
            libc::process_vm_readv(
                self.pid,
                local.as_ptr(),
                local.len() as libc::c_ulong,
                remote.as_ptr(),
                remote.len() as libc::c_ulong,
                0,
            )
        };
        match usize::try_from(read) {
            // Alive after the read: the pid named this process, not a later one with the same pid.
            Ok(read) if read == expected => self.process.check_alive(),
            Ok(read) => Err(Error::other(format!(
                "{read} of {expected} bytes could be read"
            ))),
            Err(_) => Err(Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here(buffer: &Buffer, proof: &[u8]) -> Option<ProcessVmReader> {
        ProcessVmReader::find(std::process::id(), buffer.address() as u64, proof)
    }

    #[test]
    fn a_process_is_found_by_the_bytes_in_its_memory() {
        let buffer = Buffer::from_vec(b"0123456789abcdef".to_vec());
        assert!(here(&buffer, b"0123456789abcdef").is_some());
        assert!(here(&buffer, b"0123456789abcdeF").is_none());
        assert!(ProcessVmReader::find(std::process::id(), 8, b"kv").is_none());
        assert!(ProcessVmReader::find(u32::MAX, buffer.address() as u64, b"01").is_none());
    }

    #[test]
    fn a_process_with_the_reused_pid_of_one_that_has_ended_is_not_read() {
        let from = Buffer::from_vec(vec![1; 16]);
        let (into, from) = (Buffer::zeroed(8), from.address() as u64);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = Process::open(child.id().try_into().unwrap()).unwrap();
        child.wait().unwrap();
        let reused = ProcessVmReader {
            pid: std::process::id().try_into().unwrap(),
            process: ended,
        };
        let piece = Piece {
            to: 0,
            from,
            len: 8,
        };
        assert!(reused.read(&into, &[piece]).is_err());
    }

    #[test]
    fn scattered_pieces_land_where_they_were_asked_for() {
        let from = Buffer::from_vec((0..=255).collect());
        let (into, address) = (Buffer::zeroed(8), from.address() as u64);
        let pieces = [
            Piece {
                to: 6,
                from: address + 10,
                len: 2,
            },
            Piece {
                to: 0,
                from: address + 200,
                len: 3,
            },
        ];
        let process_vm = here(&from, &[0, 1]).unwrap();
        process_vm.read(&into, &pieces).unwrap();
        assert_eq!(
            into.bytes(0, 8).unwrap().to_vec(),
            [200, 201, 202, 0, 0, 0, 10, 11]
        );
    }

    #[test]
    fn what_cannot_be_read_or_does_not_fit_is_an_error() {
        let from = Buffer::from_vec(vec![1; 16]);
        let (into, address) = (Buffer::zeroed(8), from.address() as u64);
        let process_vm = here(&from, &[1]).unwrap();
        let read = |piece| process_vm.read(&into, &[piece]);
        assert!(
            read(Piece {
                to: 7,
                from: address,
                len: 2
            })
            .is_err()
        );
        assert!(
            read(Piece {
                to: 0,
                from: 8,
                len: 2
            })
            .is_err()
        );
        let many = vec![
            Piece {
                to: 0,
                from: address,
                len: 1
            };
            PIECES_CAP + 1
        ];
        assert!(process_vm.read(&into, &many).is_err());
        assert_eq!(into.bytes(0, 8).unwrap().to_vec(), [0; 8]);
    }
}
