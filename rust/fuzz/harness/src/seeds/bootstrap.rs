//! Seeds of the bootstrap and of the handshake.

use kvpipe_core::net::codec::Writer;
use kvpipe_core::net::version::PROTOCOL_VERSION;

use crate::kinds::bootstrap::{HELLO, IDENTITY, JOIN, REFUSED, REPLY};
use crate::kinds::session::{MESSAGE, STREAM, STREAM_LOST};
use crate::script::{REMOTE_READ, SERVER, Script};

fn hello(version: u16) -> Vec<u8> {
    let hello = Writer::new(HELLO).raw(b"KVPP").u16(version);
    hello.raw(&[7; 100]).finish()
}

fn join(version: u16) -> Vec<u8> {
    let join = Writer::new(JOIN).raw(b"KVPP").u16(version);
    join.raw(&[7; 16]).u32(0).raw(&[7; 48]).finish()
}

pub(super) fn bootstrap() -> Vec<Vec<u8>> {
    let reply = |version| Writer::new(REPLY).u16(version).raw(&[7; 100]).finish();
    let record = Writer::new(IDENTITY).raw(&[7; 100]).finish();
    let refusal = Writer::new(REFUSED).u8(3).str("not now").finish();
    let differs = Writer::new(REFUSED).u8(2).str("a").str("b").str("c");
    let scripts = [
        Script::new(0)
            .connection(&hello(PROTOCOL_VERSION))
            .connection(&record)
            .shut(),
        Script::new(0).connection(&hello(PROTOCOL_VERSION + 1)),
        Script::new(SERVER)
            .connection(&reply(PROTOCOL_VERSION))
            .connection(&record),
        Script::new(SERVER).connection(&reply(PROTOCOL_VERSION - 1)),
        Script::new(SERVER).connection(&refusal),
        Script::new(REMOTE_READ)
            .connection(&differs.finish())
            .connection(&[MESSAGE]),
        Script::new(0).connection(&[STREAM, 1, 33, 7, 0]),
        Script::new(0).connection(&[STREAM_LOST, 0, 0, 0, 0]),
        Script::new(0).connection(&join(PROTOCOL_VERSION)),
        Script::new(0).connection(&join(PROTOCOL_VERSION + 1)),
    ];
    scripts.map(Script::finish).to_vec()
}

pub(super) fn handshake() -> Vec<Vec<u8>> {
    // An honest peer; one that changes a byte of its second frame; one that sends other bytes in its place. Each as client
    // and server, with and without the token, with every encryption of both.
    let flags = 0..64u8;
    let with = |moves: &'static [u8]| {
        flags
            .clone()
            .map(|flags| [&[flags], moves].concat())
            .collect::<Vec<_>>()
    };
    [
        with(&[0; 5]),
        with(&[0, 1, 9, 0, 1, 0]),
        with(&[0, 2, 2, 0, 7, 1]),
    ]
    .concat()
}
