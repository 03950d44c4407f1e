//! The wire without sockets, threads or UCX: codec, frames, handshake, identities, addresses.

pub mod address;
pub mod codec;
pub mod encryption;
pub(crate) mod fields;
pub(crate) mod framing;
pub mod handshake;
pub mod identity;
pub mod record;
pub mod secret;
pub mod version;
