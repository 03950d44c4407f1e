//! Conversations as they should go, and some that break off: what fuzzing starts from. The kinds of messages are those of docs/reference/wire-*.md.

mod agent;
mod bootstrap;
mod control;
mod decoders;
mod lookup;
mod pipe;

use kvpipe_core::net::codec::Writer;

use crate::kinds::session::{GOODBYE, HEARTBEAT, MESSAGE, STREAM};
use crate::kinds::transfer::{CREDIT, DATA, READ};
use crate::script::Script;
use crate::wire::{self, block_ids, head};

type Seeds = Vec<(&'static str, Vec<u8>)>;

fn with_name(name: &'static str, scripts: Vec<Vec<u8>>) -> Seeds {
    scripts.into_iter().map(|script| (name, script)).collect()
}

/// Seeds of every target, by its name.
pub fn seeds() -> Seeds {
    let broken = [
        with_name("agent", agent::broken_off()),
        with_name("pipe_receiver", pipe::broken_off()),
    ];
    let broken = broken.into_iter().flatten();
    conversations().into_iter().chain(broken).collect()
}

/// Those in which the peer keeps to the protocol.
pub fn conversations() -> Seeds {
    [
        with_name("agent", agent::agent()),
        with_name("bootstrap", bootstrap::bootstrap()),
        with_name("control", control::control()),
        with_name("decoders", decoders::decoders()),
        with_name("handshake", bootstrap::handshake()),
        with_name("lookup_client", lookup::client()),
        with_name("lookup_server", lookup::server()),
        with_name("pipe_receiver", pipe::receiver()),
        with_name("pipe_sender", pipe::sender()),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Ends the session in order.
fn goodbye(script: Script) -> Vec<u8> {
    let goodbye = Writer::new(GOODBYE).str("it is over").finish();
    let script = script.connection(&[HEARTBEAT]).connection(&goodbye);
    script.shut().finish()
}

/// A message without payload.
fn send(script: Script, kind: u8, id: u64) -> Script {
    script.message(&head(kind, id).finish(), &[])
}

/// Asks for a large tensor as a stream with checksums, in the first transfer of a session.
fn read(script: Script, source: u64) -> Script {
    let header = head(READ, 1).u64(source).u8(1).finish();
    script.message(&header, &block_ids(&[0]))
}

/// The first bytes of a large tensor of zeros, or of blocks.
fn stream(script: Script, id: u64, kib: u8) -> Script {
    stream_part(script, id, (0, kib), 0)
}

/// A part of a stream of zeros: where it begins and how long it is, both in KiB.
fn stream_part(script: Script, id: u64, (offset, kib): (u8, u8), end: u8) -> Script {
    let header = head(DATA, id).u64(u64::from(offset) << 10);
    script.large_part(&header.finish(), kib, end)
}

/// The same as [`stream`] in two parts, the second of which is aborted.
fn aborted_stream(script: Script, id: u64, kib: u8) -> Script {
    let script = stream(script, id, kib / 2);
    stream_part(script, id, (kib / 2, kib - kib / 2), 1)
}

/// Ends the session by each frame that is none, after what the script says.
fn broken(script: impl Fn() -> Script) -> Vec<Vec<u8>> {
    let header = head(DATA, 1).u64(0).u64(0).finish();
    let part = |end| wire::part(&header, b"part", end);
    let announced = |len: u32, begun: &[u8]| Writer::default().u32(len).raw(begun).finish();
    let on_socket = [
        announced((33 << 20) + 1, &part(0)),
        announced(27, &part(0)),
        announced(2, &[STREAM, 0]),
        announced(1, &[STREAM]),
        announced(u32::MAX, &[MESSAGE]),
        announced(0, &[]),
    ];
    let long_header = Writer::new(MESSAGE).u32(9).raw(&header[..8]).finish();
    let frames = [
        part(2),
        wire::part(&header[..20], b"part", 0),
        wire::message(&header, b"part"),
        wire::message(&[], b"payload"),
        long_header,
        vec![MESSAGE, 1],
    ];
    let on_socket = on_socket.iter().map(|bytes| script().socket(bytes));
    let frames = frames.iter().map(|frame| script().connection(frame));
    on_socket.chain(frames).map(Script::finish).collect()
}

/// The same script, with what comes last in two pieces.
fn in_pieces(script: Script, at: u16, last: impl Fn(Script) -> Script) -> Script {
    let last = last(script.cut(at));
    // The rest of a write that was cut off goes before this, and is followed by nothing of its own.
    last.message(&head(CREDIT, 99).u64(0).finish(), &[])
}
