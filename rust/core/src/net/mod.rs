//! Bytes and time in, bytes and events out: the wire's codec, the handshake, who a peer is, and how it is addressed. No UCX, no threads.

pub mod address;
pub mod codec;
pub mod handshake;
pub mod identity;
