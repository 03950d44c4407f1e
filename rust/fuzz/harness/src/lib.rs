//! The fuzz targets of `rust/fuzz` and their seeds: one function for each target. Each takes any bytes, and panics when
//! the side under test breaks a promise.

mod agent;
mod bootstrap;
mod control;
mod decoders;
mod handshake;
mod hostile;
mod kinds;
mod lookup;
mod pipe;
mod script;
mod seeds;
mod wire;

pub use decoders::decoders;
pub use script::drain_refusal;
pub use seeds::{conversations, seeds};

/// A target: any bytes.
pub type Target = fn(&[u8]);

/// Every target, by name.
pub const TARGETS: [(&str, Target); 9] = [
    ("agent", agent::agent),
    ("bootstrap", bootstrap::bootstrap),
    ("control", control::control),
    ("decoders", decoders),
    ("handshake", handshake::handshake),
    ("lookup_client", lookup::client),
    ("lookup_server", lookup::server),
    ("pipe_receiver", pipe::receiver),
    ("pipe_sender", pipe::sender),
];

/// Runs the target of this name.
///
/// # Panics
/// There is no such target, or the side under test breaks a promise.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|(target, _)| *target == name);
    let Some((_, target)) = target else {
        panic!("no target {name:?}")
    };
    target(bytes);
}
