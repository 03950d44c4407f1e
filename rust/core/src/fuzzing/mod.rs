//! What the fuzz targets of `rust/fuzz` run, and the conversations that they start from: one function for each target.
//! Each takes any bytes, and panics when what is promised of such bytes does not hold.

mod agent;
mod control;
mod decoders;
mod handshake;
mod hostile;
mod lookup;
mod pipe;
mod script;
mod seeds;
mod strangers;

pub use decoders::decoders;
pub use handshake::handshake;
pub use seeds::seeds;
pub use strangers::bootstrap;

/// A target: any bytes.
pub type Target = fn(&[u8]);

/// Every target, by name.
pub const TARGETS: [(&str, Target); 9] = [
    ("agent", agent::agent),
    ("bootstrap", bootstrap),
    ("control", control::control),
    ("decoders", decoders),
    ("handshake", handshake),
    ("lookup_client", lookup::client),
    ("lookup_server", lookup::server),
    ("pipe_receiver", pipe::receiver),
    ("pipe_sender", pipe::sender),
];

/// Runs the target of this name.
///
/// # Panics
/// There is none, or what it promises does not hold.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|(target, _)| *target == name);
    let Some((_, target)) = target else {
        panic!("no target {name:?}")
    };
    target(bytes);
}
