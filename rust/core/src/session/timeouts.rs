//! Time-outs of sessions.

use std::time::Duration;

/// Time limits of a session.
#[derive(Debug, Clone, Copy)]
pub struct SessionTimeouts {
    /// From connect or accept to an established session, and from there to the first message of the peer's service.
    pub handshake: Duration,
    /// True if a side that connects waits for a peer that does not listen yet, until `handshake` has passed.
    pub waits_for_listener: bool,
    /// Between two heartbeats.
    pub heartbeat: Duration,
    /// Without any frame of the peer, it counts as lost.
    pub silence: Duration,
}

impl Default for SessionTimeouts {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            waits_for_listener: false,
            heartbeat: Duration::from_secs(1),
            silence: Duration::from_secs(10),
        }
    }
}

impl SessionTimeouts {
    /// Those of a side that connects within `handshake`, to peers that need not listen yet.
    pub(crate) fn connecting(handshake: Duration) -> Self {
        Self {
            handshake,
            waits_for_listener: true,
            ..Self::default()
        }
    }
}
