//! The only place where errors of the core become Python exceptions.

use kvpipe_core::Error;
use pyo3::PyErr;

mod exceptions {
    //! The exception classes, which are written in Python.
    use pyo3::import_exception;

    import_exception!(kvpipe.exceptions, AuthenticationError);
    import_exception!(kvpipe.exceptions, CapacityError);
    import_exception!(kvpipe.exceptions, ClosedError);
    import_exception!(kvpipe.exceptions, ConfigError);
    import_exception!(kvpipe.exceptions, ConnectError);
    import_exception!(kvpipe.exceptions, CorruptDataError);
    import_exception!(kvpipe.exceptions, EndOfPipeError);
    import_exception!(kvpipe.exceptions, IncompatiblePeerError);
    import_exception!(kvpipe.exceptions, PeerLostError);
    import_exception!(kvpipe.exceptions, ProtocolError);
    import_exception!(kvpipe.exceptions, TransferTimeoutError);
    import_exception!(kvpipe.exceptions, TransportUnavailableError);
}

/// Maps every variant, without `_`, so that the compiler finds a forgotten one.
pub(crate) fn to_py(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Config(_) => exceptions::ConfigError::new_err(text),
        Error::Unavailable(_) => exceptions::TransportUnavailableError::new_err(text),
        Error::Connect(_) => exceptions::ConnectError::new_err(text),
        Error::Authentication(_) => exceptions::AuthenticationError::new_err(text),
        Error::Incompatible { .. } => exceptions::IncompatiblePeerError::new_err(text),
        Error::PeerLost { .. } => exceptions::PeerLostError::new_err(text),
        Error::Timeout(_) => exceptions::TransferTimeoutError::new_err(text),
        Error::Corrupt(_) => exceptions::CorruptDataError::new_err(text),
        Error::EndOfPipe => exceptions::EndOfPipeError::new_err(text),
        Error::Protocol(_) => exceptions::ProtocolError::new_err(text),
        Error::Exhausted(_) => exceptions::CapacityError::new_err(text),
        Error::Closed(_) => exceptions::ClosedError::new_err(text),
    }
}

/// A wrong argument of the user.
pub(crate) fn bad(text: impl Into<String>) -> PyErr {
    to_py(Error::Config(text.into()))
}
