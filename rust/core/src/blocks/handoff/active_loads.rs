//! The loads under way at a worker, with indices by session and by deadline.

use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

use super::load::Load;
use super::load_request::LoadCounts;
use super::shared::LoadReport;
use crate::blocks::peers::transport;
use crate::clock;
use crate::ids::{HandoffId, SessionKey};
use crate::multimap::Multimap;
use crate::reactor::Timers;
use crate::session::Links;

/// A load and its session.
pub(super) struct ActiveLoad {
    pub(super) load: Load,
    session: SessionKey,
    pub(super) started: Instant,
    /// Time of the producer's first announcement of blocks.
    pub(super) announced: Option<Instant>,
    /// Gate that has to open before its blocks may be written, so that nothing is selected before.
    pub(super) gate: Option<u64>,
    /// True if the producer was asked on this session.
    pub(super) has_selected: bool,
    /// Reason for the loss of the session.
    pub(super) lost: Option<String>,
    /// Its batches that are being read, by the owners of their transfers.
    pub(super) batches: BTreeSet<u64>,
}

impl ActiveLoad {
    pub(super) fn new(load: Load, session: SessionKey, now: Instant) -> Self {
        Self {
            load,
            session,
            started: now,
            announced: None,
            gate: None,
            has_selected: false,
            lost: None,
            batches: BTreeSet::new(),
        }
    }

    pub(super) fn session(&self) -> SessionKey {
        self.session
    }

    /// A read has ended: notes whether all that was announced is here, and how long that took.
    pub(super) fn catch_up(&mut self) {
        let since = self.announced.unwrap_or(self.started);
        let after = clock::now().saturating_duration_since(since);
        self.load.caught_up(after);
    }

    pub(super) fn report(&self, links: &Links, counts: LoadCounts) -> LoadReport {
        LoadReport {
            handoff: self.load.request.handoff,
            counts,
            transport: transport(links, self.session),
            elapsed: clock::now().saturating_duration_since(self.started),
        }
    }
}

/// All loads.
#[derive(Default)]
pub(super) struct ActiveLoads {
    loads: HashMap<HandoffId, ActiveLoad>,
    of_sessions: Multimap<SessionKey, HandoffId>,
    /// A load has one at most: until it ends it may wait for a fresh session, then for the answer whether its grant holds.
    deadlines: Timers<HandoffId>,
}

impl ActiveLoads {
    pub(super) fn insert(&mut self, active: ActiveLoad) {
        let handoff = active.load.request.handoff;
        self.of_sessions.insert(active.session, handoff);
        self.loads.insert(handoff, active);
    }

    pub(super) fn remove(&mut self, handoff: HandoffId) {
        if let Some(active) = self.loads.remove(&handoff) {
            self.of_sessions.remove(active.session, &handoff);
            self.deadlines.cancel(handoff);
        }
    }

    pub(super) fn get(&self, handoff: &HandoffId) -> Option<&ActiveLoad> {
        self.loads.get(handoff)
    }

    pub(super) fn get_mut(&mut self, handoff: &HandoffId) -> Option<&mut ActiveLoad> {
        self.loads.get_mut(handoff)
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut ActiveLoad> {
        self.loads.values_mut()
    }

    pub(super) fn handoffs(&self) -> Vec<HandoffId> {
        self.loads.keys().copied().collect()
    }

    pub(super) fn of_session(&self, session: SessionKey) -> Vec<HandoffId> {
        self.of_sessions.get(&session).copied().collect()
    }

    /// Gives a load another session.
    pub(super) fn set_session(&mut self, handoff: HandoffId, session: SessionKey) {
        if let Some(active) = self.loads.get_mut(&handoff) {
            self.of_sessions.remove(active.session, &handoff);
            active.session = session;
            self.of_sessions.insert(session, handoff);
        }
    }

    pub(super) fn set_deadline(&mut self, handoff: HandoffId, deadline: Instant) {
        self.deadlines.set(handoff, deadline);
    }

    pub(super) fn cancel_deadline(&mut self, handoff: HandoffId) {
        self.deadlines.cancel(handoff);
    }

    /// A load whose deadline has passed, once.
    pub(super) fn pop_expired(&mut self, now: Instant) -> Option<HandoffId> {
        self.deadlines.pop_expired(now)
    }

    /// The earliest deadline.
    pub(super) fn next_deadline(&mut self) -> Option<Instant> {
        self.deadlines.next()
    }

    /// Sizes of its maps.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let batches = self.loads.values().map(|active| active.batches.len());
        vec![
            ("loads", self.loads.len()),
            ("batches of loads", batches.sum()),
            ("sessions of loads", self.of_sessions.len()),
            ("deadlines of loads", self.deadlines.len()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::blocks::handoff::{LoadPart, LoadRequest};

    const ID: HandoffId = [1; 16];
    const OTHER: HandoffId = [2; 16];

    fn loads(now: Instant) -> ActiveLoads {
        let mut loads = ActiveLoads::default();
        for handoff in [ID, OTHER] {
            let request = LoadRequest {
                handoff,
                producer: "127.0.0.1:9".to_owned(),
                incarnation: [0; 16],
                parts: vec![LoadPart::of_all_regions(0, vec![0])],
                is_committed: true,
            };
            let load = Load::new(request, [vec![0]], 1);
            loads.insert(ActiveLoad::new(load, 20, now));
        }
        loads
    }

    #[test]
    fn a_load_is_found_at_its_present_session_only() {
        let mut loads = loads(Instant::now());
        loads.set_session(ID, 21);
        assert_eq!(loads.of_session(20), [OTHER]);
        assert_eq!(loads.of_session(21), [ID]);
        loads.remove(ID);
        loads.remove(OTHER);
        let sizes = loads.sizes();
        assert!(sizes.iter().all(|(_, size)| *size == 0), "{sizes:?}");
    }

    #[test]
    fn a_load_has_one_deadline_and_none_once_it_is_removed() {
        let now = Instant::now();
        let (mut loads, later) = (loads(now), now + Duration::from_secs(2));
        loads.set_deadline(ID, now);
        loads.set_deadline(ID, later);
        loads.set_deadline(OTHER, now);
        loads.remove(OTHER);
        assert_eq!(loads.pop_expired(now), None);
        assert_eq!(loads.next_deadline(), Some(later));
        assert_eq!(loads.pop_expired(later), Some(ID));
        assert_eq!(loads.next_deadline(), None);
    }
}
