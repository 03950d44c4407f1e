//! Time-outs of sessions.

use std::time::{Duration, Instant};

use crate::reactor::Route;

/// How long things may take on a session.
#[derive(Debug, Clone, Copy)]
pub struct SessionTimeouts {
    /// From connect or accept to an established session, and from there to the first message of the peer's service.
    pub handshake: Duration,
    /// Since when `handshake` counts on a side that connects; `None`: since it connects.
    pub begun: Option<Instant>,
    /// Whether a side that connects waits for a peer that does not listen yet, until `handshake` has passed.
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
            begun: None,
            waits_for_listener: false,
            heartbeat: Duration::from_secs(1),
            silence: Duration::from_secs(10),
        }
    }
}

impl SessionTimeouts {
    /// Those of the sessions along a route: connecting has what resolving has left of the route's timeout, and waits for the
    /// peer to listen.
    pub(crate) fn along(route: &Route) -> Self {
        Self {
            handshake: route.timeout,
            begun: Some(route.begun),
            waits_for_listener: true,
            ..Self::default()
        }
    }
}
