//! Commands of callers on their way to a reactor, in order. The reactor handles every command that it has accepted, also
//! one that comes while it ends.

use std::cell::Cell;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};

use super::ended;
use crate::error::Result;
use crate::sync::lock;

pub(super) enum ReactorCommand<C> {
    Command(C),
    Stop,
}

/// The callers' end.
#[derive(Debug)]
pub(super) struct CommandSender<C>(Arc<Mutex<Option<Sender<ReactorCommand<C>>>>>);

/// The reactor's end.
#[derive(Debug)]
pub(crate) struct CommandReceiver<C> {
    sender: CommandSender<C>,
    receiver: Receiver<ReactorCommand<C>>,
    is_stopping: Cell<bool>,
}

pub(super) fn channel<C>() -> (CommandSender<C>, CommandReceiver<C>) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let shared = Arc::new(Mutex::new(Some(sender)));
    let receiver = CommandReceiver {
        sender: CommandSender(Arc::clone(&shared)),
        receiver,
        is_stopping: Cell::new(false),
    };
    (CommandSender(shared), receiver)
}

impl<C> Clone for CommandSender<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C> CommandSender<C> {
    /// # Errors
    /// `Closed`: the reactor has ended.
    pub(super) fn send(&self, command: ReactorCommand<C>) -> Result<()> {
        let sender = lock(&self.0);
        let sender = sender.as_ref().ok_or_else(ended)?;
        sender.send(command).map_err(|_| ended())
    }
}

impl<C> CommandReceiver<C> {
    /// The next command; none after the one to stop.
    pub(crate) fn next(&self) -> Option<C> {
        if self.is_stopping() {
            return None;
        }
        match self.receiver.try_recv().ok()? {
            ReactorCommand::Command(command) => Some(command),
            ReactorCommand::Stop => {
                self.is_stopping.set(true);
                None
            }
        }
    }

    /// True if the command to stop has come.
    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.get()
    }

    /// Refuses commands from now on, and returns those that were accepted.
    pub(crate) fn close(&self) -> Vec<C> {
        drop(lock(&self.sender.0).take());
        let command = |command| match command {
            ReactorCommand::Command(command) => Some(command),
            ReactorCommand::Stop => None,
        };
        self.receiver.try_iter().filter_map(command).collect()
    }
}

#[cfg(test)]
impl<C> CommandReceiver<C> {
    /// Number of waiting commands. Other threads must not send meanwhile.
    pub(crate) fn len(&self) -> usize {
        let waiting: Vec<_> = self.receiver.try_iter().collect();
        let len = waiting.len();
        for command in waiting {
            drop(self.sender.send(command));
        }
        len
    }

    /// The end of a queue without a reactor, and what sends to it.
    pub(crate) fn manual() -> (impl Fn(C), Self) {
        let (sender, receiver) = channel();
        let send = move |command| drop(sender.send(ReactorCommand::Command(command)));
        (send, receiver)
    }
}
