//! Notifications that have arrived and that the user has not drained yet.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use super::notices::{WINDOW, WINDOW_BYTES};
use super::peer::Peer;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::sync::{clear, eventfd, lock, signal};
use crate::work::{Waited, wait_readable};

/// A notification of a peer. They come in the order in which they were sent.
#[derive(Debug, Clone)]
pub struct Notification {
    /// Its sender.
    pub peer: Peer,
    /// The bytes that it sent.
    pub tag: Vec<u8>,
}

/// Notifications of all peers that may wait. A peer's own are bounded, but one that comes again begins anew: from then on
/// what comes waits in its session, unacknowledged.
const CAP: usize = 64 * WINDOW as usize;
/// Most bytes of their tags.
const BYTES_CAP: usize = 64 * WINDOW_BYTES;

/// A session, and the number before which everything that it sent was drained.
pub(super) type Drained = (SessionKey, u64);

#[derive(Debug, Default)]
struct InboxState {
    waiting: VecDeque<(u64, Notification)>,
    /// Bytes of their tags.
    tag_bytes: usize,
    is_closed: bool,
}

#[derive(Debug)]
pub(super) struct NotificationInbox {
    state: Mutex<InboxState>,
    /// Readable while something waits, and from the end of the agent on.
    ready: OwnedFd,
}

impl NotificationInbox {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            state: Mutex::default(),
            ready: eventfd()?,
        })
    }

    /// Notifications that the user has not drained.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.state().waiting.len()
    }

    fn state(&self) -> MutexGuard<'_, InboxState> {
        lock(&self.state)
    }

    /// True if another notification may wait.
    pub(super) fn has_room(&self) -> bool {
        let state = self.state();
        state.waiting.len() < CAP && state.tag_bytes < BYTES_CAP
    }

    pub(super) fn push(&self, number: u64, notification: Notification) {
        let mut state = self.state();
        state.tag_bytes += notification.tag.len();
        state.waiting.push_back((number, notification));
        if state.waiting.len() == 1 {
            signal(&self.ready);
        }
    }

    /// Takes everything that waits, and tells before which number everything of each session was drained.
    ///
    /// # Errors
    /// The inbox is empty, and the agent was closed.
    pub(super) fn drain(&self) -> Result<(Vec<Notification>, Vec<Drained>)> {
        let mut state = self.state();
        if state.waiting.is_empty() && state.is_closed {
            return Err(Error::Closed("the agent was closed".to_owned()));
        }
        if !state.is_closed {
            clear(&self.ready);
        }
        state.tag_bytes = 0;
        let mut drained: Vec<Drained> = Vec::new();
        let mut notifications = Vec::with_capacity(state.waiting.len());
        for (number, notification) in state.waiting.drain(..) {
            let session = notification.peer.session();
            match drained.iter_mut().find(|(other, _)| *other == session) {
                Some((_, upto)) => *upto = number + 1,
                None => drained.push((session, number + 1)),
            }
            notifications.push(notification);
        }
        Ok((notifications, drained))
    }

    /// Waits until something can be drained, `deadline` has passed, or a signal arrived.
    pub(super) fn wait(&self, deadline: Option<Instant>) -> Result<Waited> {
        let is_ready = || {
            let state = self.state();
            state.is_closed || !state.waiting.is_empty()
        };
        wait_readable(&self.ready, deadline, is_ready)
    }

    pub(super) fn close(&self) {
        self.state().is_closed = true;
        signal(&self.ready);
    }

    pub(super) fn fd(&self) -> RawFd {
        self.ready.as_raw_fd()
    }
}
