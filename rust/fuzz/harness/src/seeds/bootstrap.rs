//! Seeds of the bootstrap and of the handshake.

use kvpipe_core::net::codec::Writer;

use super::{REMOTE_READ, SERVER};
use crate::script::Script;

pub(super) fn bootstrap() -> Vec<Vec<u8>> {
    let hello = Writer::new(1).raw(b"KVPP").u16(2).raw(&[7; 32]).finish();
    let challenge = Writer::new(2).u16(2).raw(&[7; 32]).finish();
    let checksum_mode = Writer::new(3).raw(&[7; 32]).finish();
    let refusal = Writer::new(7).u8(3).str("not now").finish();
    let differs = Writer::new(7).u8(2).str("a").str("b").str("c").finish();
    let other = Writer::new(1).raw(b"KVPP").u16(9).raw(&[7; 32]).finish();
    vec![
        Script::new(0)
            .connection(&hello)
            .connection(&checksum_mode)
            .shut()
            .finish(),
        Script::new(0)
            .connection(&other)
            .message(&[0], &[])
            .finish(),
        Script::new(SERVER)
            .connection(&challenge)
            .connection(&checksum_mode)
            .finish(),
        Script::new(SERVER).connection(&refusal).finish(),
        Script::new(REMOTE_READ)
            .connection(&differs)
            .connection(&[33])
            .finish(),
    ]
}

pub(super) fn handshake() -> Vec<Vec<u8>> {
    // An honest peer; one that changes a byte of its second frame; one that sends other bytes in its place.
    let flags = [0, 1, 2, 3];
    let with = |moves: &'static [u8]| flags.map(|flags| [&[flags], moves].concat());
    [
        with(&[0; 5]),
        with(&[0, 1, 9, 0, 1, 0]),
        with(&[0, 2, 2, 0, 7, 1]),
    ]
    .concat()
}
