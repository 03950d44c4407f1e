//! The tokens of a listener.

use kvpipe_core::net::secret::Tokens;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

/// One token, or the current one and the next, which are not copied.
#[derive(FromPyObject)]
pub(crate) enum ListenerTokens {
    One(PyBackedBytes),
    Two(PyBackedBytes, PyBackedBytes),
}

impl ListenerTokens {
    pub(crate) fn core(&self) -> Tokens<'_> {
        match self {
            Self::One(current) => Tokens::from(&current[..]),
            Self::Two(current, next) => Tokens {
                current,
                next: Some(next),
            },
        }
    }
}
