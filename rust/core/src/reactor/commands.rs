//! What callers ask of a reactor, on its way there, in the order in which they ask. All that a reactor has not refused it
//! takes, also what comes while it ends.

use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::ENDED;
use crate::error::{Error, Result};

pub(super) enum ReactorCommand<C> {
    Command(C),
    Stop,
}

/// The callers' end.
#[derive(Debug)]
pub(super) struct CommandSender<C>(Arc<Mutex<Option<Sender<ReactorCommand<C>>>>>);

/// The reactor's end.
#[derive(Debug)]
pub(super) struct CommandReceiver<C> {
    sender_half: CommandSender<C>,
    receiver: Receiver<ReactorCommand<C>>,
}

pub(super) fn channel<C>() -> (CommandSender<C>, CommandReceiver<C>) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let shared = Arc::new(Mutex::new(Some(sender)));
    let sender_half = CommandSender(Arc::clone(&shared));
    let receiver_half = CommandReceiver {
        sender_half: CommandSender(shared),
        receiver,
    };
    (sender_half, receiver_half)
}

impl<C> CommandSender<C> {
    fn sender(&self) -> MutexGuard<'_, Option<Sender<ReactorCommand<C>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// `Closed`: the reactor has ended.
    pub(super) fn send(&self, control: ReactorCommand<C>) -> Result<()> {
        let sender = self.sender();
        let sent = sender
            .as_ref()
            .is_some_and(|sender| sender.send(control).is_ok());
        sent.then_some(())
            .ok_or_else(|| Error::Closed(ENDED.to_owned()))
    }
}

impl<C> CommandReceiver<C> {
    /// What was asked for next, if there is anything.
    pub(super) fn next(&self) -> Option<ReactorCommand<C>> {
        self.receiver.try_recv().ok()
    }

    /// Refuses what is asked for from now on, and gives what was before.
    pub(super) fn close(&self) -> Vec<C> {
        drop(self.sender_half.sender().take());
        let command = |control| match control {
            ReactorCommand::Command(command) => Some(command),
            ReactorCommand::Stop => None,
        };
        self.receiver.try_iter().filter_map(command).collect()
    }
}
