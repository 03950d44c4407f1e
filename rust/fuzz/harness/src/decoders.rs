//! Every decoder that reads bytes of a peer.

use kvpipe_core::fuzzing::DECODERS;

/// Runs the decoder that the first byte names on the other bytes: what it decodes, its encoder writes byte for byte.
///
/// # Panics
/// The encoder writes something else.
pub fn decoders(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    let (name, decode) = DECODERS[usize::from(*kind) % DECODERS.len()];
    if let Some(written) = decode(bytes) {
        assert_eq!(written, bytes, "{name}");
    }
}
