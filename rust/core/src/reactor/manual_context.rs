//! What tests of parts of a reactor use.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use super::{ReactorConfig, ReactorContext, eventfd};
use crate::net::identity::{Identity, SessionKind};
use crate::session::connection::SessionTimeouts;
use crate::transport::Context;

impl ReactorContext {
    /// That of no reactor.
    pub(crate) fn manual(context: Option<Context>) -> Self {
        let config = ReactorConfig {
            listen: None,
            token: Vec::new(),
            identity: Identity::new(SessionKind::Control, "", Vec::new()).expect("identity"),
            transport: None,
            local: Ipv4Addr::LOCALHOST.into(),
            timeouts: SessionTimeouts::default(),
            busy_poll: Duration::ZERO,
        };
        let wake = Arc::new(eventfd().expect("eventfd"));
        Self::new(config, None, context.map(Arc::new), wake).expect("cx")
    }

    /// That of a reactor whose data plane has ended, but not so many of its reads.
    pub(crate) fn with_pending_reads(reads: usize) -> Self {
        let cx = Self::manual(None);
        cx.pending_reads.pretend(reads);
        cx
    }
}
