//! The objects that operations hold or wait for.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use super::super::info::StoreInfo;
use super::{Access, EntryId, Holder, Key, Query, Tick};
use crate::error::{Error, Result};
use crate::ids::SessionKey;

/// Waits, reservations, open entries and leases of one client.
pub(super) const HOLDS_CAP: usize = 1 << 14;

#[derive(Debug)]
pub(super) enum Hold {
    AwaitsSpace {
        tick: Tick,
        key: Key,
        footprint: u64,
    },
    Reserved {
        /// Of the call.
        tick: Tick,
        key: Key,
        footprint: u64,
    },
    AwaitsEntry {
        tick: Tick,
        query: Query<Key>,
        access: Access,
        /// The caller's own deadline; a load may have moved the one that counts.
        until: Option<Instant>,
    },
    Open(EntryId),
    Leased {
        id: EntryId,
        /// The holder has all of the entry. It may still give it back.
        is_consumed: bool,
    },
}

impl Hold {
    pub(super) fn is_waiting(&self) -> bool {
        matches!(self, Self::AwaitsSpace { .. } | Self::AwaitsEntry { .. })
    }

    fn num_waiting_bytes(&self) -> usize {
        match self {
            Self::AwaitsEntry { query, .. } => query.num_bytes(),
            _ => 0,
        }
    }

    /// Counts a hold that begins or ends.
    pub(super) fn count(&self, info: &mut StoreInfo, begins: bool) {
        let counter = match self {
            Self::AwaitsSpace { .. } | Self::AwaitsEntry { .. } => &mut info.num_waiting,
            Self::Reserved { .. } => &mut info.num_reserved,
            Self::Leased { .. } => &mut info.num_leased,
            Self::Open(_) => return,
        };
        *counter = if begins { *counter + 1 } else { *counter - 1 };
    }
}

#[derive(Debug, Default)]
pub(super) struct Holds {
    holds: BTreeMap<Holder, Hold>,
    of_clients: HashMap<SessionKey, ClientHolds>,
}

/// The holds of one client.
#[derive(Debug, Default)]
struct ClientHolds {
    num_held: usize,
    /// Bytes of its queries that wait.
    num_waiting_bytes: usize,
}

impl Holds {
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("holds", self.holds.len()),
            ("clients that may hold", self.of_clients.len()),
        ]
    }

    pub(super) fn session_up(&mut self, session: SessionKey) {
        self.of_clients.insert(session, ClientHolds::default());
    }

    /// Forgets a client, which holds nothing any more; whether there was one.
    pub(super) fn session_down(&mut self, session: SessionKey) -> bool {
        self.of_clients.remove(&session).is_some()
    }

    pub(super) fn check_new(&self, holder: Holder) -> Result<()> {
        let (session, operation) = holder;
        let Some(ClientHolds { num_held, .. }) = self.of_clients.get(&session) else {
            return Err(Error::protocol(
                "a message of a client that is not connected",
            ));
        };
        if self.holds.contains_key(&holder) {
            let text = format_args!("operation {operation} has begun already");
            return Err(Error::protocol(text));
        }
        if *num_held >= HOLDS_CAP {
            return Err(Error::Exhausted(format!(
                "this client holds {num_held} reservations, values and waits, more are not possible: close some first"
            )));
        }
        Ok(())
    }

    pub(super) fn get(&self, holder: Holder) -> Option<&Hold> {
        self.holds.get(&holder)
    }

    pub(super) fn get_mut(&mut self, holder: Holder) -> Option<&mut Hold> {
        self.holds.get_mut(&holder)
    }

    pub(super) fn insert(&mut self, holder: Holder, hold: Hold) {
        self.remove(holder);
        if let Some(client) = self.of_clients.get_mut(&holder.0) {
            client.num_held += 1;
            client.num_waiting_bytes += hold.num_waiting_bytes();
        }
        self.holds.insert(holder, hold);
    }

    pub(super) fn remove(&mut self, holder: Holder) -> Option<Hold> {
        let hold = self.holds.remove(&holder)?;
        if let Some(client) = self.of_clients.get_mut(&holder.0) {
            client.num_held -= 1;
            client.num_waiting_bytes -= hold.num_waiting_bytes();
        }
        Some(hold)
    }

    pub(super) fn num_waiting_bytes(&self, session: SessionKey) -> usize {
        let client = self.of_clients.get(&session);
        client.map_or(0, |client| client.num_waiting_bytes)
    }

    /// The operations of a client.
    pub(super) fn of(&self, session: SessionKey) -> Vec<Holder> {
        let range = (session, 0)..=(session, u64::MAX);
        self.holds.range(range).map(|(holder, _)| *holder).collect()
    }
}
