//! The version of the wire format.

/// Version of everything on the wire; other versions are refused.
pub const PROTOCOL_VERSION: u16 = 15;
