//! Reads of another process on this machine without UCX: many pieces in one call of `process_vm_readv`, where UCX's CMA
//! makes a call for each. That halves the time for pieces of 4 KiB (docs/benchmarks.md), and changes nothing for 64 KiB.

use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::buffer::{Buffer, MemoryKind};
use crate::shared_bytes::SharedBytes;

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

/// Reason for which a process was not read.
#[derive(Debug, thiserror::Error)]
pub enum ProcessVmError {
    /// This process may not read it. The text names the cause and the remedy; what reads without the kernel's permission
    /// still works.
    #[error("{0}")]
    Refused(String),
    /// It has ended, or has no such memory (any more).
    #[error("{0}")]
    Lost(Error),
}

/// Classifies the error of a refused call of `process_vm_readv`. `ESRCH` and `EFAULT` are about the other process: it
/// has ended, or has no such memory. Any other errno is about this one: `EPERM` without the permission, `EPERM`,
/// `EACCES` or `ENOSYS` from a seccomp filter or a security module, `ENOMEM` from a kernel without memory for the call.
fn classify(pid: libc::pid_t, error: Error) -> ProcessVmError {
    match error.raw_os_error() {
        Some(libc::ESRCH | libc::EFAULT) | None => ProcessVmError::Lost(error),
        Some(_) => ProcessVmError::Refused(Circumstances::of(pid).explain(pid, &error)),
    }
}

/// Lets other processes of this user read the memory of this one, where Yama (`kernel.yama.ptrace_scope` 1) allows it to
/// ancestors alone. A kernel without Yama has nothing to be set.
pub fn let_processes_read() {
    // SAFETY: takes numbers, and changes who may trace this process.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
}

impl ProcessVmReader {
    /// The process that claims this pid and `len` bytes at `address` of its memory, which `is_proof` knows.
    ///
    /// # Errors
    /// The process cannot be read; the error has the reason.
    pub fn find(
        pid: u32,
        address: u64,
        len: usize,
        is_proof: impl FnOnce(SharedBytes<'_>) -> bool,
    ) -> std::result::Result<Self, ProcessVmError> {
        let refused = |text: String| Err(ProcessVmError::Refused(text));
        let Some(pid) = libc::pid_t::try_from(pid).ok().filter(|pid| *pid > 0) else {
            return refused(format!("{pid} is no process id"));
        };
        let process = match Process::open(pid) {
            Ok(process) => process,
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                return refused(format!(
                    "there is no process {pid} here: {SAME_PID_NAMESPACE}"
                ));
            }
            Err(error) => {
                return refused(format!(
                    "pidfd_open is refused ({error}): it needs Linux 5.3, and a seccomp profile of the container that allows it"
                ));
            }
        };
        let found = Self { pid, process };
        let read = Buffer::zeroed(len);
        let piece = Piece {
            to: 0,
            from: address,
            len,
        };
        let other = || {
            format!(
                "process {pid} here is not the peer, or the peer has given up meanwhile; if this repeats, {SAME_PID_NAMESPACE}"
            )
        };
        match found.read(&read, &[piece]) {
            Ok(()) if read.bytes(0, len).is_some_and(is_proof) => Ok(found),
            Ok(()) => refused(other()),
            // The address is the peer's, and another process may have nothing there.
            Err(ProcessVmError::Lost(error)) if error.raw_os_error() == Some(libc::EFAULT) => {
                refused(other())
            }
            Err(error) => Err(error),
        }
    }

    /// Reads all pieces into `into`, synchronously.
    ///
    /// # Errors
    /// A piece does not fit, there are too many, or the other process cannot be read there (any more). The destination is
    /// undefined then.
    pub fn read(&self, into: &Buffer, pieces: &[Piece]) -> std::result::Result<(), ProcessVmError> {
        let pieces: Vec<_> = pieces.iter().map(|piece| (into, *piece)).collect();
        self.read_scattered(&pieces)
    }

    /// As [`read`](Self::read), each piece into a buffer of its own.
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn read_scattered(
        &self,
        pieces: &[(&Buffer, Piece)],
    ) -> std::result::Result<(), ProcessVmError> {
        let (local, remote) = vectors(pieces).map_err(ProcessVmError::Lost)?;
        let expected: usize = pieces.iter().map(|(_, piece)| piece.len).sum();
        let read = call(self.pid, &local, &remote).map_err(|error| classify(self.pid, error))?;
        if read != expected {
            let text = format!("{read} of {expected} bytes could be read");
            return Err(ProcessVmError::Lost(Error::other(text)));
        }
        // Alive after the read: the pid named this process, not a later one with the same pid.
        self.process.check_alive().map_err(ProcessVmError::Lost)
    }
}

type Vectors = (Vec<libc::iovec>, Vec<libc::iovec>);

/// The pieces as the kernel takes them: ours, and the other process's. The kernel finds the pages of each range of the other
/// process by itself, so that pieces that follow each other there are one.
fn vectors(pieces: &[(&Buffer, Piece)]) -> Result<Vectors> {
    if pieces.len() > PIECES_CAP {
        return Err(ErrorKind::InvalidInput.into());
    }
    let (mut local, mut remote) = (
        Vec::with_capacity(pieces.len()),
        Vec::with_capacity(pieces.len()),
    );
    for (into, piece) in pieces {
        let range = into.writable_range(piece.to, piece.len);
        let start = range.filter(|_| into.kind() == MemoryKind::Host);
        local.push(libc::iovec {
            iov_base: start.ok_or(ErrorKind::InvalidInput)?,
            iov_len: piece.len,
        });
        let from = usize::try_from(piece.from).map_err(|_| ErrorKind::InvalidInput)?;
        match remote.last_mut() {
            Some(last) if follows(last, from) => last.iov_len += piece.len,
            _ => remote.push(libc::iovec {
                iov_base: std::ptr::without_provenance_mut(from),
                iov_len: piece.len,
            }),
        }
    }
    Ok((local, remote))
}

/// True if a range ends where another one begins.
fn follows(range: &libc::iovec, address: usize) -> bool {
    range.iov_base.addr().checked_add(range.iov_len) == Some(address)
}

/// Bytes that the kernel has read. The local vectors are ranges of host memory that the caller may write to.
fn call(pid: libc::pid_t, local: &[libc::iovec], remote: &[libc::iovec]) -> Result<usize> {
    // SAFETY: each local range lies in host memory that is valid for writes while its owner is borrowed; the kernel
    // checks the remote ranges and only reads them, even if a peer has claimed the pid of this process.
    let read = unsafe {
        libc::process_vm_readv(
            pid,
            local.as_ptr(),
            local.len() as libc::c_ulong,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    };
    usize::try_from(read).map_err(|_| Error::last_os_error())
}

const SAME_PID_NAMESPACE: &str =
    "run both sides in one pid namespace (shareProcessNamespace, hostPID, --pid=host)";
const PTRACE: &str = "give this process CAP_SYS_PTRACE";

/// The kernel's settings that may explain a refused read of another process.
#[derive(Debug, Default)]
struct Circumstances {
    /// Error of a read of this process itself, which is always permitted.
    self_refused: Option<Error>,
    /// The seccomp mode of this process.
    seccomp: Option<String>,
    our_uid: Option<String>,
    their_uid: Option<String>,
    /// `None` where the kernel has no Yama.
    yama_scope: Option<String>,
}

impl Circumstances {
    fn of(pid: libc::pid_t) -> Self {
        Self {
            self_refused: read_self().err(),
            seccomp: status_field("self", "Seccomp:"),
            our_uid: status_field("self", "Uid:"),
            their_uid: status_field(&pid.to_string(), "Uid:"),
            yama_scope: yama_scope(),
        }
    }

    /// Reason for the refusal, and the remedy. If even a read of this process itself is refused, the call is refused,
    /// else the permission for the other process.
    fn explain(&self, pid: libc::pid_t, error: &Error) -> String {
        if let Some(refused) = &self.self_refused {
            let cause = if self.seccomp.as_ref().is_some_and(|mode| mode != "0") {
                "the seccomp profile of this process does not allow it: allow process_vm_readv in it"
            } else {
                "the kernel or a security module does not allow it: CONFIG_CROSS_MEMORY_ATTACH is needed"
            };
            return format!("process_vm_readv is refused ({refused}); {cause}");
        }
        let cause = match (&self.our_uid, &self.their_uid, &self.yama_scope) {
            (Some(ours), Some(theirs), _) if ours != theirs => format!(
                "it runs as user {theirs}, this process as user {ours}: run both as one user, or {PTRACE}"
            ),
            (_, _, Some(scope)) if scope != "0" => {
                format!("kernel.yama.ptrace_scope is {scope}: set it to 0, or {PTRACE}")
            }
            _ => format!(
                "it is not dumpable, has capabilities that this process lacks, or is in another user namespace: run both alike, or {PTRACE}"
            ),
        };
        format!("process_vm_readv of process {pid} is refused ({error}); {cause}")
    }
}

/// Reads a byte of this process as if it was another one.
fn read_self() -> Result<()> {
    let (from, into) = (Buffer::zeroed(1), Buffer::zeroed(1));
    let piece = Piece {
        to: 0,
        from: from.address() as u64,
        len: 1,
    };
    let (local, remote) = vectors(&[(&into, piece)])?;
    let pid = libc::pid_t::try_from(std::process::id()).map_err(Error::other)?;
    call(pid, &local, &remote).map(drop)
}

/// The first value of a field of `/proc/PROCESS/status`.
fn status_field(process: &str, name: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next().map(str::to_owned)
}

fn yama_scope() -> Option<String> {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?;
    Some(scope.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(
        pid: u32,
        address: u64,
        proof: &[u8],
    ) -> std::result::Result<ProcessVmReader, ProcessVmError> {
        ProcessVmReader::find(pid, address, proof.len(), |read| read == *proof)
    }

    fn here(buffer: &Buffer, proof: &[u8]) -> std::result::Result<ProcessVmReader, ProcessVmError> {
        find(std::process::id(), buffer.address() as u64, proof)
    }

    #[test]
    fn a_process_is_found_by_the_bytes_in_its_memory() {
        let buffer = Buffer::from_vec(b"0123456789abcdef".to_vec());
        assert!(here(&buffer, b"0123456789abcdef").is_ok());
        assert!(here(&buffer, b"0123456789abcdeF").is_err());
        assert!(find(std::process::id(), 8, b"kv").is_err());
        assert!(find(u32::MAX, buffer.address() as u64, b"01").is_err());
    }

    #[test]
    fn a_process_that_is_not_found_is_refused_with_the_reason() {
        let buffer = Buffer::from_vec(b"01".to_vec());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let reason = |found: std::result::Result<_, ProcessVmError>| match found {
            Err(ProcessVmError::Refused(reason)) => reason,
            other => panic!("{other:?}"),
        };
        let ended = reason(find(child.id(), 8, b"01"));
        assert!(
            ended.contains("no process") && ended.contains("pid namespace"),
            "{ended}"
        );
        for other in [here(&buffer, b"10"), find(std::process::id(), 8, b"01")] {
            let other = reason(other);
            assert!(other.contains("is not the peer"), "{other}");
        }
    }

    #[test]
    fn an_errno_is_about_the_other_process_or_about_this_one() {
        let pid = std::process::id().try_into().unwrap();
        let is_refused = |errno| {
            let error = classify(pid, Error::from_raw_os_error(errno));
            matches!(error, ProcessVmError::Refused(_))
        };
        for errno in [libc::EPERM, libc::EACCES, libc::ENOSYS, libc::ENOMEM] {
            assert!(is_refused(errno), "{errno}");
        }
        for errno in [libc::ESRCH, libc::EFAULT] {
            assert!(!is_refused(errno), "{errno}");
        }
    }

    /// Explanation of a refused read of process 7.
    fn reason(circumstances: &Circumstances) -> String {
        circumstances.explain(7, &Error::from_raw_os_error(libc::EPERM))
    }

    fn of_users(ours: &str, theirs: &str, yama_scope: Option<&str>) -> Circumstances {
        Circumstances {
            our_uid: Some(ours.to_owned()),
            their_uid: Some(theirs.to_owned()),
            yama_scope: yama_scope.map(str::to_owned),
            ..Circumstances::default()
        }
    }

    #[test]
    fn a_read_that_yama_refuses_names_the_setting_and_the_remedy() {
        assert_eq!(
            reason(&of_users("1000", "1000", Some("1"))),
            "process_vm_readv of process 7 is refused (Operation not permitted (os error 1)); kernel.yama.ptrace_scope is 1: set it to 0, or give this process CAP_SYS_PTRACE"
        );
    }

    #[test]
    fn a_read_that_neither_users_nor_yama_refuse_names_what_is_left_and_the_remedy() {
        let sentence = "process_vm_readv of process 7 is refused (Operation not permitted (os error 1)); it is not dumpable, has capabilities that this process lacks, or is in another user namespace: run both alike, or give this process CAP_SYS_PTRACE";
        for yama_scope in [None, Some("0")] {
            assert_eq!(reason(&of_users("1000", "1000", yama_scope)), sentence);
        }
        let unreadable = Circumstances::default();
        assert_eq!(reason(&unreadable), sentence);
    }

    #[test]
    fn a_read_of_another_user_names_both_users_whatever_yama_says() {
        for yama_scope in [None, Some("0"), Some("2")] {
            let reason = reason(&of_users("1000", "0", yama_scope));
            let users = "; it runs as user 0, this process as user 1000: run both as one user, or";
            assert!(reason.contains(users), "{reason}");
        }
    }

    #[test]
    fn a_call_that_is_refused_for_this_process_too_names_seccomp_or_the_kernel() {
        for (seccomp, cause) in [
            (Some("2"), "allow process_vm_readv in it"),
            (Some("0"), "CONFIG_CROSS_MEMORY_ATTACH is needed"),
            (None, "CONFIG_CROSS_MEMORY_ATTACH is needed"),
        ] {
            let reason = reason(&Circumstances {
                self_refused: Some(Error::from_raw_os_error(libc::ENOSYS)),
                seccomp: seccomp.map(str::to_owned),
                ..of_users("1000", "0", Some("1"))
            });
            assert!(reason.contains("(Function not implemented"), "{reason}");
            assert!(reason.ends_with(cause), "{reason}");
        }
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
    fn pieces_that_follow_each_other_are_one_range_of_the_other_process() {
        let from = Buffer::from_vec((0..=255).collect());
        let (into, address) = (Buffer::zeroed(8), from.address() as u64);
        let piece = |to, from, len| Piece {
            to,
            from: address + from,
            len,
        };
        let pieces = [piece(4, 10, 2), piece(0, 12, 3), piece(6, 20, 2)];
        let (local, remote) = vectors(&pieces.map(|piece| (&into, piece))).unwrap();
        assert_eq!((local.len(), remote.len()), (3, 2));
        let process_vm = here(&from, &[0, 1]).unwrap();
        process_vm.read(&into, &pieces).unwrap();
        assert_eq!(
            into.bytes(0, 8).unwrap().to_vec(),
            [12, 13, 14, 0, 10, 11, 20, 21]
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
