//! Where messages land whose payload goes straight from UCX's receive buffer to where it belongs.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;

use kvpipe_ucx::Placer;

/// What begins the header of such a message: session, kind, an id.
const NAME_LEN: usize = 16 + 1 + 8;

pub(crate) type LandingName = [u8; NAME_LEN];

/// Places payloads where they belong.
pub(crate) trait Landing {
    /// Takes a payload, given what follows the name in its header; false when it does not belong here.
    fn place(&mut self, header: &[u8], payload: &[u8]) -> bool;
}

type Shared = Rc<RefCell<dyn Landing>>;

/// Where messages to a reactor land, by what their headers begin with.
#[derive(Clone, Default)]
pub(crate) struct Landings(Rc<RefCell<HashMap<LandingName, Shared>>>);

impl Landings {
    /// What the worker offers payloads to. It is called by C, and must not panic.
    pub(super) fn placer(&self) -> Placer {
        let landings = self.clone();
        Box::new(move |header, data| landings.place(header, data).unwrap_or(false))
    }

    /// A payload that is not placed, whatever is wrong with it, becomes an event, where that is found again.
    pub(crate) fn place(&self, header: &[u8], payload: &[u8]) -> Option<bool> {
        let (name, rest) = header.split_first_chunk()?;
        let landings = self.0.try_borrow().ok()?;
        let mut landing = landings.get(name)?.try_borrow_mut().ok()?;
        Some(landing.place(rest, payload))
    }

    pub(crate) fn add(&self, name: LandingName, landing: Shared) {
        self.0.borrow_mut().insert(name, landing);
    }

    pub(crate) fn remove(&self, name: &LandingName) {
        self.0.borrow_mut().remove(name);
    }
}

impl fmt::Debug for Landings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Landings").finish_non_exhaustive()
    }
}
