//! The loads under way at a worker, with indices by session and by deadline.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::load::Load;
use super::load_request::{LoadCounts, LoadId};
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
            rank: self.load.request.rank,
            counts,
            transport: transport(links, self.session),
            elapsed: clock::now().saturating_duration_since(self.started),
        }
    }
}

/// All loads.
#[derive(Default)]
pub(super) struct ActiveLoads {
    loads: BTreeMap<LoadId, ActiveLoad>,
    of_sessions: Multimap<SessionKey, LoadId>,
    /// A load has one at most: until it ends it may wait for a fresh session, then for the answer whether its grant holds.
    deadlines: Timers<LoadId>,
}

impl ActiveLoads {
    pub(super) fn insert(&mut self, active: ActiveLoad) {
        let id = active.load.request.id();
        self.of_sessions.insert(active.session, id);
        self.loads.insert(id, active);
    }

    pub(super) fn remove(&mut self, id: LoadId) {
        if let Some(active) = self.loads.remove(&id) {
            self.of_sessions.remove(active.session, &id);
            self.deadlines.cancel(id);
        }
    }

    pub(super) fn get(&self, id: &LoadId) -> Option<&ActiveLoad> {
        self.loads.get(id)
    }

    pub(super) fn get_mut(&mut self, id: &LoadId) -> Option<&mut ActiveLoad> {
        self.loads.get_mut(id)
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut ActiveLoad> {
        self.loads.values_mut()
    }

    pub(super) fn ids(&self) -> Vec<LoadId> {
        self.loads.keys().copied().collect()
    }

    /// The loads of a handoff, one for each worker of the producer.
    pub(super) fn of_handoff(&self, handoff: HandoffId) -> Vec<LoadId> {
        let of_handoff = self.loads.range(LoadId::range(handoff));
        of_handoff.map(|(id, _)| *id).collect()
    }

    /// The load of a handoff at a session.
    pub(super) fn at(&self, session: SessionKey, handoff: HandoffId) -> Option<LoadId> {
        let first = *LoadId::range(handoff).start();
        let mut loads = self.of_sessions.get_from(&session, first);
        loads.next().copied().filter(|id| id.handoff == handoff)
    }

    pub(super) fn of_session(&self, session: SessionKey) -> Vec<LoadId> {
        self.of_sessions.get(&session).copied().collect()
    }

    /// Gives a load another session.
    pub(super) fn set_session(&mut self, id: LoadId, session: SessionKey) {
        if let Some(active) = self.loads.get_mut(&id) {
            self.of_sessions.remove(active.session, &id);
            active.session = session;
            self.of_sessions.insert(session, id);
        }
    }

    pub(super) fn set_deadline(&mut self, id: LoadId, deadline: Instant) {
        self.deadlines.set(id, deadline);
    }

    pub(super) fn cancel_deadline(&mut self, id: LoadId) {
        self.deadlines.cancel(id);
    }

    /// A load whose deadline has passed, once.
    pub(super) fn pop_expired(&mut self, now: Instant) -> Option<LoadId> {
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

    const ID: LoadId = of([1; 16]);
    const OTHER: LoadId = of([2; 16]);

    const fn of(handoff: HandoffId) -> LoadId {
        LoadId { handoff, rank: 3 }
    }

    fn loads(now: Instant) -> ActiveLoads {
        let mut loads = ActiveLoads::default();
        for id in [ID, OTHER] {
            let request = LoadRequest {
                handoff: id.handoff,
                rank: id.rank,
                producer: "127.0.0.1:9".to_owned(),
                incarnation: [0; 16],
                parts: vec![LoadPart::of_all_regions(0, vec![0])],
                is_committed: true,
                ..LoadRequest::default()
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
        assert_eq!(loads.at(21, ID.handoff), Some(ID));
        assert_eq!(loads.at(20, ID.handoff), None);
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
