//! What the operations of clients hold or wait for.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use super::super::{HOLDS_CAP, StoreInfo};
use super::{Holder, Key, Tick, ValueId};
use crate::error::{Error, Result};
use crate::ids::SessionKey;

#[derive(Debug)]
pub(super) enum Hold {
    AwaitsSpace {
        tick: Tick,
        key: Key,
        footprint: u64,
    },
    Reserved {
        key: Key,
        footprint: u64,
    },
    /// A select, or with a lease a take.
    AwaitsValue {
        tick: Tick,
        key: Key,
        lease: Option<Duration>,
        /// The caller's own deadline; a load may have moved the one that counts.
        until: Option<Instant>,
    },
    Open(ValueId),
    Leased(ValueId),
}

impl Hold {
    pub(super) fn is_waiting(&self) -> bool {
        matches!(self, Self::AwaitsSpace { .. } | Self::AwaitsValue { .. })
    }

    /// Counts a hold that begins or ends.
    pub(super) fn count(&self, info: &mut StoreInfo, begins: bool) {
        let counter = match self {
            Self::AwaitsSpace { .. } | Self::AwaitsValue { .. } => &mut info.num_waiting,
            Self::Reserved { .. } => &mut info.num_reserved,
            Self::Leased(_) => &mut info.num_leased,
            Self::Open(_) => return,
        };
        *counter = if begins { *counter + 1 } else { *counter - 1 };
    }
}

#[derive(Debug, Default)]
pub(super) struct Holds {
    holds: BTreeMap<Holder, Hold>,
    num_of_clients: HashMap<SessionKey, usize>,
}

impl Holds {
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("holds", self.holds.len()),
            ("clients that may hold", self.num_of_clients.len()),
        ]
    }

    pub(super) fn session_up(&mut self, session: SessionKey) {
        self.num_of_clients.insert(session, 0);
    }

    /// Forgets a client, which holds nothing any more; whether there was one.
    pub(super) fn session_down(&mut self, session: SessionKey) -> bool {
        self.num_of_clients.remove(&session).is_some()
    }

    pub(super) fn check_new(&self, holder: Holder) -> Result<()> {
        let (session, operation) = holder;
        let Some(&num_held) = self.num_of_clients.get(&session) else {
            return Err(Error::protocol(
                "a message of a client that is not connected",
            ));
        };
        if self.holds.contains_key(&holder) {
            let text = format_args!("operation {operation} has begun already");
            return Err(Error::protocol(text));
        }
        if num_held >= HOLDS_CAP {
            return Err(Error::Exhausted(format!(
                "this client holds {num_held} reservations, values and waits, more are not possible: close some first"
            )));
        }
        Ok(())
    }

    pub(super) fn get(&self, holder: Holder) -> Option<&Hold> {
        self.holds.get(&holder)
    }

    pub(super) fn insert(&mut self, holder: Holder, hold: Hold) {
        if self.holds.insert(holder, hold).is_none()
            && let Some(num_held) = self.num_of_clients.get_mut(&holder.0)
        {
            *num_held += 1;
        }
    }

    pub(super) fn remove(&mut self, holder: Holder) -> Option<Hold> {
        let hold = self.holds.remove(&holder)?;
        if let Some(num_held) = self.num_of_clients.get_mut(&holder.0) {
            *num_held -= 1;
        }
        Some(hold)
    }

    /// The operations of a client.
    pub(super) fn of(&self, session: SessionKey) -> Vec<Holder> {
        let range = (session, 0)..=(session, u64::MAX);
        self.holds.range(range).map(|(holder, _)| *holder).collect()
    }
}
