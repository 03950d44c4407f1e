//! System calls that the kernel refuses a process of a test, and the log of that process.

use std::sync::LazyLock;

use super::log_lines::LogLines;

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;
/// Positions of the two first fields of `seccomp_data`.
const SYSTEM_CALL_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
/// A user without rights, and its group.
const UNPRIVILEGED: libc::uid_t = 65534;

const fn filter(code: u32, jumps: (u8, u8), k: u32) -> libc::sock_filter {
    let (jt, jf) = jumps;
    let code = code as u16;
    libc::sock_filter { code, jt, jf, k }
}

/// Has the kernel answer `process_vm_readv` with this errno in all threads of this process, by a filter as containers have
/// one.
pub fn refuse_process_vm_readv(errno: i32) {
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let is_equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let end = libc::BPF_RET | libc::BPF_K;
    let mut program = [
        filter(load, (0, 0), ARCHITECTURE_AT),
        filter(is_equal, (0, 3), ARCHITECTURE),
        filter(load, (0, 0), SYSTEM_CALL_AT),
        filter(is_equal, (0, 1), libc::SYS_process_vm_readv as u32),
        filter(end, (0, 0), libc::SECCOMP_RET_ERRNO | errno.cast_unsigned()),
        filter(end, (0, 0), libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: takes numbers.
    let set = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the program outlives the call, which copies it.
    let set = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const program,
        )
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// True if this process may become another user.
pub fn is_root() -> bool {
    // SAFETY: takes nothing, and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Makes this process another user's, without rights.
pub fn become_unprivileged() {
    // SAFETY: takes numbers; libc changes all threads.
    let set = unsafe { libc::setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: as above.
    let set = unsafe { libc::setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// The lines that this process has logged.
static LINES: LazyLock<LogLines> = LazyLock::new(LogLines::default);

/// Notes what this process logs from now on.
pub fn note_log() {
    tracing::subscriber::set_global_default(LINES.clone()).expect("the first one");
}

/// The lines that this process has logged so far.
pub fn logged() -> Vec<String> {
    LINES.get()
}
