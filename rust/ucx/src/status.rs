//! The status of a UCX call: the code, and the call that returned it.

use std::fmt;

use crate::sys::{self, ucs_status_ptr_t, ucs_status_t};

/// A `ucs_status_t` other than success, with the call that returned it.
///
/// kvpipe uses the same type where it refuses a call before UCX sees it; `call` then names the
/// UCX function that would have been called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// UCX's numeric code, negative for errors.
    pub code: i32,
    /// The UCX function.
    pub call: &'static str,
}

impl Status {
    pub(crate) fn new(code: ucs_status_t, call: &'static str) -> Self {
        Self {
            code: i32::from(code),
            call,
        }
    }

    /// True if the peer is lost, as opposed to a wrong call.
    pub fn is_disconnect(&self) -> bool {
        let disconnects = [
            sys::UCS_ERR_IO_ERROR,
            sys::UCS_ERR_UNREACHABLE,
            sys::UCS_ERR_CANCELED,
            sys::UCS_ERR_TIMED_OUT,
            sys::UCS_ERR_NOT_CONNECTED,
            sys::UCS_ERR_CONNECTION_RESET,
            sys::UCS_ERR_ENDPOINT_TIMEOUT,
        ];
        disconnects.iter().any(|code| i32::from(*code) == self.code)
    }

    /// UCX's text for this code.
    pub fn text(&self) -> &'static str {
        match TEXTS.binary_search_by(|(code, _)| self.code.cmp(code)) {
            Ok(at) => TEXTS[at].1,
            Err(_) if (-59..=-40).contains(&self.code) => "session failure",
            Err(_) if (-89..=-60).contains(&self.code) => "endpoint failure",
            Err(_) => "unknown error",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.text(), self.code)
    }
}

impl std::error::Error for Status {}

/// In descending order of code.
const TEXTS: [(i32, &str); 28] = [
    (1, "operation in progress"),
    (0, "success"),
    (-1, "no pending message"),
    (-2, "no resources are available to initiate the operation"),
    (-3, "input/output error"),
    (-4, "out of memory"),
    (-5, "invalid parameter"),
    (-6, "destination is unreachable"),
    (-7, "address not valid"),
    (-8, "function not implemented"),
    (-9, "message truncated"),
    (-10, "no progress"),
    (-11, "provided buffer is too small"),
    (-12, "no such element"),
    (-13, "failed to connect some of the requested endpoints"),
    (-14, "no such device"),
    (-15, "device is busy"),
    (-16, "request canceled"),
    (-17, "shared memory error"),
    (-18, "element already exists"),
    (-19, "index out of range"),
    (-20, "operation timed out"),
    (-21, "user-defined limit was reached"),
    (-22, "unsupported operation"),
    (-23, "operation rejected by remote peer"),
    (-24, "endpoint is not connected"),
    (-25, "connection reset by remote peer"),
    (-80, "endpoint timeout"),
];

pub(crate) fn check(code: ucs_status_t, call: &'static str) -> Result<(), Status> {
    if code == sys::UCS_OK {
        Ok(())
    } else {
        Err(Status::new(code, call))
    }
}

/// The result of a non-blocking call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Posted {
    /// Finished already; the callback will not run.
    Complete,
    /// The callback will run, from a later progress.
    Pending,
    /// Refused; the callback will not run.
    Refused(ucs_status_t),
}

impl Posted {
    /// `UCS_PTR_IS_ERR` and `UCS_PTR_RAW_STATUS`, which are macros in C.
    pub(crate) fn from_ptr(ptr: ucs_status_ptr_t) -> Self {
        let value = ptr as isize;
        match value {
            0 => Self::Complete,
            sys::UCS_ERR_LAST..0 => Self::Refused(value as ucs_status_t),
            _ => Self::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_call_text_and_code() {
        let status = Status {
            code: -25,
            call: "ucp_get_nbx",
        };
        assert_eq!(
            status.to_string(),
            "ucp_get_nbx: connection reset by remote peer (-25)"
        );
        assert_eq!(
            Status {
                code: -62,
                call: "x"
            }
            .text(),
            "endpoint failure"
        );
        assert_eq!(
            Status {
                code: -99,
                call: "x"
            }
            .text(),
            "unknown error"
        );
    }

    #[test]
    fn every_text_is_found() {
        for (code, text) in TEXTS {
            assert_eq!(Status { code, call: "x" }.text(), text);
        }
    }

    #[test]
    fn status_pointers_are_told_apart() {
        let ptr = |value: isize| value as ucs_status_ptr_t;
        assert_eq!(Posted::from_ptr(ptr(0)), Posted::Complete);
        assert_eq!(Posted::from_ptr(ptr(-1)), Posted::Refused(-1));
        assert_eq!(Posted::from_ptr(ptr(-100)), Posted::Refused(-100));
        assert_eq!(Posted::from_ptr(ptr(-101)), Posted::Pending);
        assert_eq!(Posted::from_ptr(ptr(0x7f00_0000_1000)), Posted::Pending);
    }
}
