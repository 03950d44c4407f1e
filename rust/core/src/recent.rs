//! What is remembered of handoffs that are over.

use std::collections::{HashMap, VecDeque};

use crate::ids::HandoffId;

/// Handoffs that are remembered.
const CAP: usize = 4096;

/// A map that forgets its oldest entries.
#[derive(Debug)]
pub(crate) struct RecentHandoffs<T> {
    entries: HashMap<HandoffId, T>,
    order: VecDeque<HandoffId>,
}

impl<T> Default for RecentHandoffs<T> {
    fn default() -> Self {
        Self {
            entries: HashMap::new(),
            order: VecDeque::new(),
        }
    }
}

impl<T> RecentHandoffs<T> {
    pub(crate) fn insert(&mut self, handoff: HandoffId, value: T) {
        if self.entries.insert(handoff, value).is_none() {
            self.order.push_back(handoff);
        }
        if self.order.len() > CAP
            && let Some(oldest) = self.order.pop_front()
        {
            self.entries.remove(&oldest);
        }
    }

    pub(crate) fn get(&self, handoff: &HandoffId) -> Option<&T> {
        self.entries.get(handoff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_entry_is_forgotten_first() {
        let mut recent = RecentHandoffs::default();
        let id = |n: usize| {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&n.to_le_bytes());
            id
        };
        for n in 0..=CAP {
            recent.insert(id(n), n);
        }
        assert_eq!(recent.get(&id(0)), None);
        assert_eq!(recent.get(&id(1)), Some(&1));
        assert_eq!(recent.get(&id(CAP)), Some(&CAP));
    }
}
