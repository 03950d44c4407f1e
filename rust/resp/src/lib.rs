//! A client of Valkey and Redis for large values. It speaks RESP2 over TCP or TLS, writes values from the caller's memory
//! and reads them into it.
//!
//! A [`Connection`] is used by one thread at a time and blocks; each of its waits is bounded. Several connections carry
//! the parts of one value side by side: [`write_parts`] and [`read_parts`]. A [`Subscription`] is shared by any number of
//! threads. An [`Error`] breaks the connection, because its outstanding replies are unknown. An error *reply* of the
//! server is no `Error`, except to a subscription, which it ends: [`Error::Refused`].
#![forbid(unsafe_code)]

mod connection;
mod parts;
mod reply;
mod stream;
mod subscription;

pub use connection::{Closer, Connection, address_of};
pub use parts::{PartOutcome, read_parts, write_parts};
pub use reply::Reply;
pub use stream::Tls;
pub use subscription::{Subscription, Waited, Waiter};

/// Reason for which a connection cannot be used, or not any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// A file of certificates cannot be used.
    Config(String),
    /// The server was not reached.
    Connect(String),
    /// The connection was lost, or ended earlier.
    Lost(String),
    /// The server did not answer in time.
    Timeout(String),
    /// The server's bytes are not RESP2, or beyond its limits here.
    Protocol(String),
    /// The server has refused a command of a subscription, with this error reply.
    Refused(String),
    /// This process has no descriptor or memory left. The connection can be used on.
    Exhausted(String),
}

impl std::fmt::Display for Error {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Config(text)
        | Self::Connect(text)
        | Self::Lost(text)
        | Self::Timeout(text)
        | Self::Protocol(text)
        | Self::Refused(text)
        | Self::Exhausted(text)) = self;
        formatter.write_str(text)
    }
}

impl std::error::Error for Error {}

/// Shorthand of this crate.
pub type Result<T> = std::result::Result<T, Error>;
