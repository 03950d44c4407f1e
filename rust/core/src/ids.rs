//! Names of sessions, processes, handoffs and regions, and a bounded memory of handoffs that have ended.

use std::collections::{HashMap, VecDeque};

/// Names a session within its reactor; never used again.
pub type SessionKey = u64;

/// One life of an agent or a control port: random, so that nothing of an earlier life is taken for the present one.
pub type Incarnation = [u8; 16];

/// Names one attempt to move one request's KV from producer to consumer; random, minted by the proxy.
pub type HandoffId = [u8; 16];

/// Names a grant of a handoff's blocks within the agent that produces them; counts up, never used again. A handoff that
/// ends and becomes ready again has another one.
pub type Epoch = u64;

/// Names a region within its agent; in the order of registration, never used again.
pub type RegionId = u32;

/// Most handoffs that are remembered.
const RECENT_CAP: usize = 4096;

/// Data about handoffs that have ended. It forgets the oldest ones.
#[derive(Debug, Default)]
pub(crate) struct RecentHandoffs<T> {
    entries: HashMap<HandoffId, T>,
    order: VecDeque<HandoffId>,
}

impl<T> RecentHandoffs<T> {
    pub(crate) fn insert(&mut self, handoff: HandoffId, value: T) {
        if self.entries.insert(handoff, value).is_none() {
            self.order.push_back(handoff);
        }
        if self.order.len() > RECENT_CAP
            && let Some(oldest) = self.order.pop_front()
        {
            self.entries.remove(&oldest);
        }
    }

    /// Number of remembered handoffs.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.entries.len().max(self.order.len())
    }

    pub(crate) fn get(&self, handoff: &HandoffId) -> Option<&T> {
        self.entries.get(handoff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_handoff_is_forgotten_first() {
        let mut recent = RecentHandoffs::default();
        let id = |n: usize| {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&n.to_le_bytes());
            id
        };
        for n in 0..=RECENT_CAP {
            recent.insert(id(n), n);
        }
        assert_eq!(recent.get(&id(0)), None);
        assert_eq!(recent.get(&id(1)), Some(&1));
        assert_eq!(recent.get(&id(RECENT_CAP)), Some(&RECENT_CAP));
    }
}
