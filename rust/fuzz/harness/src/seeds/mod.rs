//! Conversations as they should go: what fuzzing starts from. The kinds of messages are those of docs/reference/wire-*.md.

mod agent;
mod bootstrap;
mod control;
mod decoders;
mod lookup;
mod pipe;

use kvpipe_core::net::codec::Writer;

use crate::kinds::session::{GOODBYE, HEARTBEAT, STREAM};
use crate::kinds::transfer::{DATA, READ};
use crate::script::Script;
use crate::wire::{block_ids, head};

/// Seeds of every target, by its name.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let with_name = |name, scripts: Vec<Vec<u8>>| scripts.into_iter().map(move |it| (name, it));
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

/// The first bytes of a large tensor of zeros.
fn stream(script: Script, id: u64, kib: u8) -> Script {
    script.large(&head(DATA, id).u64(0).finish(), (kib, 0))
}

/// A part of a stream whose sender has its memory back.
fn aborted(script: Script, id: u64) -> Script {
    let header = head(DATA, id).u64(0).u64(0).finish();
    let frame = Writer::new(STREAM).u8(header.len() as u8).raw(&header);
    script.connection(&frame.raw(&[0; 64]).u8(1).finish())
}
