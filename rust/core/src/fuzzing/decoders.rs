//! Everything that is read from bytes of a peer and can be written again.

use crate::net::codec::{Reader, Writer};
use crate::net::identity::Identity;
use crate::tensor::Meta;
use crate::transfer::fetch::Offer;
use crate::transfer::region::RemoteRegion;
use crate::{blocks, control, lookup};

/// Checks that what can be read is written as it was. `read` takes from the start of `bytes` and writes it.
fn again(bytes: &[u8], read: impl FnOnce(&mut Reader<'_>) -> crate::Result<Writer>) {
    let mut reader = Reader::new(bytes);
    if let Ok(written) = read(&mut reader) {
        let taken = bytes.len() - reader.rest().len();
        assert_eq!(written.finish(), bytes[..taken]);
    }
}

/// The decoder that the first byte names, over the others: what it can read is what its encoder writes.
///
/// # Panics
/// It is not.
pub fn decoders(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    let writer = Writer::default;
    match kind % 16 {
        0 => again(bytes, |r| Ok(Identity::read(r)?.write(writer()))),
        1 => again(bytes, |r| Ok(Meta::read(r)?.write(writer()))),
        2 => again(bytes, |r| Ok(Offer::read(r)?.write(writer()))),
        3 => again(bytes, |r| Ok(RemoteRegion::read(r)?.write(writer()))),
        4 => control::fuzzing::decode(bytes),
        kind @ 5..=11 => blocks::fuzzing::decode(kind - 5, bytes),
        kind @ 12..=14 => lookup::fuzzing::decode(kind - 12, bytes),
        _ => checksums(bytes),
    }
}

/// An offer, then messages of checksums of its pieces, each with its length in front.
fn checksums(bytes: &[u8]) {
    let mut reader = Reader::new(bytes);
    let Ok(mut offer) = Offer::read(&mut reader) else {
        return;
    };
    let mut known = 0;
    while let Ok(message) = reader.bytes(1 << 14) {
        let Ok(range) = offer.receive_checksums(message) else {
            return;
        };
        assert_eq!(range.start, known);
        known = range.end;
        assert!(known <= offer.len);
    }
}
