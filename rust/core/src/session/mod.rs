//! Sessions: the authenticated connection to a peer, its UCX endpoint, and what a caller may expect of a peer that is late.

pub mod connection;
pub(crate) mod data_plane;
pub(crate) mod fair_waitlist;
pub(crate) mod grace;
pub(crate) mod landings;

pub use connection::SessionTimeouts;
