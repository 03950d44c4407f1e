//! Messages of channels for callers that wait: [`Subscription`] and [`Waiter`].
//!
//! All waiters share one connection and no thread. One of those that wait is the driver: it reads from the connection and
//! wakes the others. When it leaves, another one drives. So a message wakes its waiter without a step in between.

use std::collections::{BTreeMap, HashMap};
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

use crate::connection::{Timed, encode};
use crate::reply::{Reply, ReplyReader, lost};
use crate::stream::{Stream, readable};
use crate::{Error, Result};

/// Outcome of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// Something has changed: a message has arrived, or messages arrive from now on.
    Changed,
    /// The deadline has passed.
    TimedOut,
    /// A signal has arrived. The caller may wait again.
    Interrupted,
}

/// A connection that subscribes to the channels of its waiters. It ends with its first error.
///
/// Channels without a waiter are unsubscribed from when the next one is subscribed to: a caller that has what it waited
/// for loses no time by a command, and may wait for the same channel again without one.
#[derive(Debug)]
pub struct Subscription(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Longest time between a command and its answer.
    timeout: Duration,
    /// Held by the driver. A thread that holds `state` only tries to lock it.
    reader: Mutex<ReplyReader<Timed>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    writer: Timed,
    channels: HashMap<Vec<u8>, Channel>,
    /// Waiters that sleep while another one drives.
    sleeping: BTreeMap<u64, Arc<OwnedFd>>,
    next_id: u64,
    /// The SUBSCRIBEs that were sent, and those that were answered; answers have the order of the commands.
    num_subscribes: u64,
    num_subscribed: u64,
    /// Commands of any kind without an answer.
    num_unanswered: u64,
    /// Time of the server's last message, or of the first request after that.
    quiet_since: Instant,
    has_received: bool,
    ended: Option<Error>,
}

#[derive(Debug)]
struct Channel {
    /// The number of its SUBSCRIBE.
    number: u64,
    /// The waiters by id; true for those that have been notified.
    waiters: BTreeMap<u64, bool>,
}

/// One caller that waits for messages of a channel.
#[derive(Debug)]
pub struct Waiter {
    shared: Arc<Shared>,
    channel: Vec<u8>,
    id: u64,
    event: Arc<OwnedFd>,
}

impl Subscription {
    pub(crate) fn new(stream: Arc<Stream>, timeout: Duration) -> Self {
        let reader = Mutex::new(ReplyReader::new(Timed::new(Arc::clone(&stream), timeout)));
        let writer = Timed::new(stream, timeout);
        Self(Arc::new(Shared {
            timeout,
            reader,
            state: Mutex::new(State {
                writer,
                channels: HashMap::new(),
                sleeping: BTreeMap::new(),
                next_id: 0,
                num_subscribes: 0,
                num_subscribed: 0,
                num_unanswered: 0,
                quiet_since: Instant::now(),
                has_received: false,
                ended: None,
            }),
        }))
    }

    /// Begins to wait for messages of a channel.
    pub fn listen(&self, channel: &[u8]) -> Result<Waiter> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(exhausted)?;
        let mut state = self.0.state();
        state.check()?;
        let id = state.next_id;
        state.next_id += 1;
        if !state.channels.contains_key(channel) {
            let is_left = |_: &Vec<u8>, channel: &mut Channel| channel.waiters.is_empty();
            let left: Vec<_> = state.channels.extract_if(is_left).collect();
            let mut commands: Vec<Vec<&[u8]>> = left
                .iter()
                .map(|(name, _)| vec![&b"UNSUBSCRIBE"[..], name])
                .collect();
            commands.push(vec![b"SUBSCRIBE", channel]);
            state.send(self.0.timeout, &commands)?;
            state.num_subscribes += 1;
            let number = state.num_subscribes;
            let waiters = BTreeMap::new();
            state
                .channels
                .insert(channel.to_vec(), Channel { number, waiters });
        }
        if let Some(listened) = state.channels.get_mut(channel) {
            listened.waiters.insert(id, false);
        }
        Ok(Waiter {
            shared: Arc::clone(&self.0),
            channel: channel.to_vec(),
            id,
            event: Arc::new(event),
        })
    }

    /// True if the server has answered at all, other than by an error.
    pub fn has_received(&self) -> bool {
        self.0.state().has_received
    }

    /// True if an error has ended it.
    pub fn has_ended(&self) -> bool {
        self.0.state().ended.is_some()
    }

    /// Ends the connection. Waiters get [`Error::Lost`].
    ///
    /// Dropping does not: a forked child that drops its copy would end the connection of its parent.
    pub fn close(&self) {
        self.0
            .state()
            .end(Error::Lost("the subscription was closed".to_owned()));
    }
}

impl Waiter {
    /// Begins an attempt to get what the caller waits for. Every change from now on ends the next [`wait`](Self::wait).
    ///
    /// Returns whether messages arrive. Only then may the caller wait after an attempt that failed.
    pub fn begin(&self) -> Result<bool> {
        let mut state = self.shared.state();
        state.check()?;
        let num_subscribed = state.num_subscribed;
        let Some(channel) = state.channels.get_mut(&self.channel) else {
            return Ok(false);
        };
        channel.waiters.insert(self.id, false);
        Ok(channel.number <= num_subscribed)
    }

    /// Waits for a change since [`begin`](Self::begin).
    pub fn wait(&self, deadline: Option<Instant>) -> Result<Waited> {
        let mut state = self.shared.state();
        let waited = loop {
            state.check()?;
            if state.is_notified(self) {
                break Ok(Waited::Changed);
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                break Ok(Waited::TimedOut);
            }
            let result = if let Some(reader) = self.shared.try_drive() {
                drop(state);
                let result = self.shared.drive(reader, deadline);
                state = self.shared.state();
                result
            } else {
                state.sleeping.insert(self.id, Arc::clone(&self.event));
                drop(state);
                let result = readable(&*self.event, deadline);
                state = self.shared.state();
                state.sleeping.remove(&self.id);
                // The counter is zero if this waiter has not been woken.
                let _ = rustix::io::read(&*self.event, &mut [0; 8]);
                result.map(drop)
            };
            match result {
                Ok(()) => {}
                Err(Errno::INTR) => break Ok(Waited::Interrupted),
                Err(error) => break Err(exhausted(error)),
            }
        };
        if self.shared.try_drive().is_some() {
            state.wake_a_driver();
        }
        waited
    }

    /// Ends the waiter. A second call does nothing.
    pub fn close(&self) {
        if let Some(channel) = self.shared.state().channels.get_mut(&self.channel) {
            channel.waiters.remove(&self.id);
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The reader, unless another waiter drives.
    fn try_drive(&self) -> Option<MutexGuard<'_, ReplyReader<Timed>>> {
        match self.reader.try_lock() {
            Ok(reader) => Some(reader),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Waits until the server sends something, `deadline`, or the time for a probe, and dispatches what has arrived.
    fn drive(
        &self,
        mut reader: MutexGuard<'_, ReplyReader<Timed>>,
        deadline: Option<Instant>,
    ) -> rustix::io::Result<()> {
        let probe_at = self.state().quiet_since + self.timeout;
        let until = deadline.map_or(probe_at, |deadline| deadline.min(probe_at));
        let is_readable = reader.has_bytes() || reader.stream().stream().wait(until)?;
        if !is_readable {
            if until == probe_at {
                self.state().probe(self.timeout);
            }
            return Ok(());
        }
        loop {
            // Whatever has begun is complete within the time for an answer.
            reader.stream_mut().restart(self.timeout);
            let reply = reader.read_reply();
            let mut state = self.state();
            match reply {
                Ok(reply) => state.dispatch(reply),
                Err(error) => state.end(error),
            }
            if state.ended.is_some() || !reader.has_bytes() {
                return Ok(());
            }
        }
    }
}

impl State {
    fn check(&self) -> Result<()> {
        self.ended.clone().map_or(Ok(()), Err)
    }

    fn is_notified(&self, waiter: &Waiter) -> bool {
        let channel = self.channels.get(&waiter.channel);
        channel.is_some_and(|channel| channel.waiters.get(&waiter.id) == Some(&true))
    }

    /// Sends commands, each of which the server answers once.
    fn send(&mut self, timeout: Duration, commands: &[Vec<&[u8]>]) -> Result<()> {
        let mut encoded = Vec::new();
        for command in commands {
            encode(&mut encoded, command);
        }
        self.writer.restart(timeout);
        if let Err(error) = self.writer.write_all(&mut [IoSlice::new(&encoded)]) {
            self.end(lost(&error));
            return self.check();
        }
        if self.num_unanswered == 0 {
            self.quiet_since = Instant::now();
        }
        self.num_unanswered += commands.len() as u64;
        Ok(())
    }

    /// Asks a silent server whether it is there; one that owes an answer is not.
    fn probe(&mut self, timeout: Duration) {
        if self.quiet_since + timeout > Instant::now() {
            // Another thread has sent a command while the driver slept.
            return;
        }
        if self.num_unanswered > 0 {
            self.end(Error::Timeout(
                "the server did not answer in time".to_owned(),
            ));
        } else {
            // An error has ended the subscription, and its waiters learn it.
            let _ = self.send(timeout, &[vec![b"PING"]]);
        }
    }

    /// Wakes the waiters of a channel that has changed.
    fn dispatch(&mut self, reply: Reply) {
        if let Reply::Error(text) = reply {
            self.end(Error::Refused(text));
            return;
        }
        self.quiet_since = Instant::now();
        self.has_received = true;
        let words = match &reply {
            Reply::Array(words) => words.as_slice(),
            // A PING without a subscription is answered by a status.
            _ => &[],
        };
        match words {
            [Reply::Bulk(kind), Reply::Bulk(channel), ..] if kind == b"message" => {
                self.notify(channel);
            }
            [Reply::Bulk(kind), Reply::Bulk(channel), ..] if kind == b"subscribe" => {
                self.num_unanswered = self.num_unanswered.saturating_sub(1);
                self.num_subscribed += 1;
                self.notify(channel);
            }
            _ => self.num_unanswered = self.num_unanswered.saturating_sub(1),
        }
    }

    fn notify(&mut self, channel: &[u8]) {
        let Some(channel) = self.channels.get_mut(channel) else {
            return;
        };
        for (id, is_notified) in &mut channel.waiters {
            *is_notified = true;
            if let Some(event) = self.sleeping.get(id) {
                wake(event);
            }
        }
    }

    /// Wakes a sleeping waiter, because no thread drives the connection.
    fn wake_a_driver(&self) {
        if let Some(event) = self.sleeping.values().next() {
            wake(event);
        }
    }

    fn end(&mut self, error: Error) {
        self.ended.get_or_insert(error);
        self.writer.stream().shutdown();
        self.sleeping.values().for_each(wake);
    }
}

/// The error of a call of the system for which this process has no descriptor or memory left.
fn exhausted(error: Errno) -> Error {
    Error::Exhausted(format!("cannot wait for messages: {error}"))
}

fn wake(event: &Arc<OwnedFd>) {
    // It fails only where the counter is at its limit, and the descriptor readable.
    let _ = rustix::io::write(&**event, &1_u64.to_ne_bytes());
}

#[cfg(test)]
mod tests;
