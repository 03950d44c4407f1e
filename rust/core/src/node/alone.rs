//! What tests of parts of a node use.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use super::{Io, NodeConfig, eventfd};
use crate::identity::{Identity, Service};
use crate::link::Timing;
use crate::transport::Context;

impl Io {
    /// That of no node.
    pub(crate) fn alone(context: Option<Context>) -> Self {
        let config = NodeConfig {
            listen: None,
            token: Vec::new(),
            identity: Identity::new(Service::Control, "", Vec::new()).expect("identity"),
            transport: None,
            local: Ipv4Addr::LOCALHOST.into(),
            timing: Timing::default(),
            busy_poll: Duration::ZERO,
        };
        let wake = Arc::new(eventfd().expect("eventfd"));
        Self::new(config, None, context.map(Arc::new), wake).expect("io")
    }

    /// That of a node whose data plane has ended, but not so many of its reads.
    pub(crate) fn with_unended_reads(reads: usize) -> Self {
        let io = Self::alone(None);
        io.unended_reads.pretend(reads);
        io
    }
}
