//! State that the reactor's thread shows to others.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard};

use super::inbox::NotificationInbox;
use super::peer::{Counters, Peer};
use crate::error::Result;
use crate::ids::SessionKey;
use crate::sync::lock;

/// State that the reactor's thread shows to others.
#[derive(Debug)]
pub(super) struct SharedAgentState {
    pub(super) peers: Mutex<BTreeMap<SessionKey, Peer>>,
    pub(super) counters: Counters,
    pub(super) inbox: NotificationInbox,
    pub(super) num_regions: AtomicUsize,
}

impl SharedAgentState {
    /// # Errors
    /// The system has no descriptor left.
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            peers: Mutex::default(),
            counters: Counters::default(),
            inbox: NotificationInbox::new()?,
            num_regions: AtomicUsize::new(0),
        })
    }

    pub(super) fn peers(&self) -> MutexGuard<'_, BTreeMap<SessionKey, Peer>> {
        lock(&self.peers)
    }
}
