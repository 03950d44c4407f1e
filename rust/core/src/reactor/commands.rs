//! What callers ask of a reactor, on its way there, in the order in which they ask. All that a reactor has not refused it
//! takes, also what comes while it ends.

use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::ENDED;
use crate::error::{Error, Result};

pub(super) enum Control<C> {
    Command(C),
    Stop,
}

/// The callers' end.
#[derive(Debug)]
pub(super) struct Inlet<C>(Arc<Mutex<Option<Sender<Control<C>>>>>);

/// The reactor's end.
#[derive(Debug)]
pub(super) struct Outlet<C> {
    inlet: Inlet<C>,
    receiver: Receiver<Control<C>>,
}

pub(super) fn channel<C>() -> (Inlet<C>, Outlet<C>) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let shared = Arc::new(Mutex::new(Some(sender)));
    let inlet = Inlet(Arc::clone(&shared));
    let outlet = Outlet {
        inlet: Inlet(shared),
        receiver,
    };
    (inlet, outlet)
}

impl<C> Inlet<C> {
    fn sender(&self) -> MutexGuard<'_, Option<Sender<Control<C>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// `Closed`: the reactor has ended.
    pub(super) fn send(&self, control: Control<C>) -> Result<()> {
        let sender = self.sender();
        let sent = sender
            .as_ref()
            .is_some_and(|sender| sender.send(control).is_ok());
        sent.then_some(())
            .ok_or_else(|| Error::Closed(ENDED.to_owned()))
    }
}

impl<C> Outlet<C> {
    /// What was asked for next, if there is anything.
    pub(super) fn next(&self) -> Option<Control<C>> {
        self.receiver.try_recv().ok()
    }

    /// Refuses what is asked for from now on, and gives what was before.
    pub(super) fn close(&self) -> Vec<C> {
        drop(self.inlet.sender().take());
        let command = |control| match control {
            Control::Command(command) => Some(command),
            Control::Stop => None,
        };
        self.receiver.try_iter().filter_map(command).collect()
    }
}
