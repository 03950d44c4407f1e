//! Hosts a service that moves bytes on a reactor: owns its transfers and the memory that arrives, feeds them the events
//! of the reactor, and hands the service the completions.

use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::{Buffer, Status};

use super::region::Layout;
use super::source::SourceRequest;
use super::{Completion, Message, TransferEngine};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::reactor::Reactor;
use crate::session::{Links, Payload, ReactorConfig, Service};
use crate::transport::{Memory, Pool};

/// Buffers from this size are kept in memory of a pool with huge pages: the first use of a page costs more than the copy.
/// Measured for 64 MiB: 36 ms into new pages, 15 ms into new huge pages, 5 ms into used pages.
pub(crate) const HUGE: usize = 4 << 20;

/// Parts of the reactor that a service of transfers uses during a call.
pub(crate) struct Cx<'a> {
    /// The sessions of the reactor.
    pub(crate) links: &'a mut Links,
    /// The transfers, in both directions.
    pub(crate) transfers: &'a mut TransferEngine,
    /// Memory for arriving bytes.
    pub(crate) pool: &'a Pool,
}

impl Cx<'_> {
    /// Registered memory for at least `len` bytes, with any content.
    ///
    /// # Errors
    /// As of [`Pool::acquire`].
    pub(crate) fn memory(&self, len: usize) -> Result<Arc<Memory>> {
        if len < HUGE {
            self.links.register(Buffer::zeroed(len))
        } else {
            self.pool.acquire(len, |fresh| self.links.register(fresh))
        }
    }

    /// As [`memory`](Self::memory), but for bytes that stay: no larger memory of the pool is used for them.
    ///
    /// # Errors
    /// As of [`Pool::acquire`].
    pub(crate) fn exact_memory(&self, len: usize) -> Result<Arc<Memory>> {
        if len < HUGE {
            return self.memory(len);
        }
        self.pool
            .acquire_exact(len, |fresh| self.links.register(fresh))
    }

    /// The first `len` bytes of [`memory`](Self::memory) for that many. With the buffer, pooled memory goes back.
    pub(crate) fn lend(&self, memory: Arc<Memory>, len: usize) -> Option<Buffer> {
        if len < HUGE {
            Some(memory.buffer().clone())
        } else {
            self.pool.lend(memory, len)
        }
    }
}

/// A service that moves bytes: as [`Service`], and what a [`Host`] asks of it for its transfers. After each event the host
/// hands it all transfers that have ended.
pub(crate) trait TransferService {
    /// Requests of other threads.
    type Command: Send + 'static;
    /// Transfers from one peer under way at once; more wait, and a peer may ask for no more.
    const TRANSFERS_IN_FLIGHT: usize;

    /// As of [`Service`].
    fn command(&mut self, cx: &mut Cx<'_>, command: Self::Command);
    /// As of [`Service`].
    fn accept(
        &mut self,
        _session: SessionKey,
        _peer: &Identity,
    ) -> std::result::Result<(), String> {
        Ok(())
    }
    /// As of [`Service`].
    fn dismissed(&mut self, _session: SessionKey) {}
    /// As of [`Service`].
    fn session_up(&mut self, cx: &mut Cx<'_>, session: SessionKey, peer: &Identity);
    /// As of [`Service`]. The transfers of the session have failed.
    fn session_down(&mut self, cx: &mut Cx<'_>, session: SessionKey, error: Error);
    /// As of [`Service`].
    fn data_path_changed(&mut self, _cx: &mut Cx<'_>, _session: SessionKey) {}
    /// A message that is not of a transfer: its kind and the rest of its header.
    fn message(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        message: (u8, Reader<'_>),
        data: Payload,
    ) -> Result<()>;
    /// The memory that a peer wants to have streamed or checksummed.
    ///
    /// # Errors
    /// It is not exposed: the peer is refused, or its session ends if that is an error of the protocol.
    fn source(&mut self, request: &SourceRequest) -> Result<(Arc<Memory>, Layout)>;
    /// A transfer of this side has ended.
    fn transferred(&mut self, cx: &mut Cx<'_>, completion: Completion);
    /// A transfer of this side has failed at its deadline, and reads of it may still write: it ends later.
    fn late(&mut self, _cx: &mut Cx<'_>, _owner: u64, _error: Error) {}
    /// Does what follows from an event. Called after each, once the transfers that have ended were handed over.
    fn advance(&mut self, _cx: &mut Cx<'_>) {}
    /// Runs a slice of long work of the service's own; true if there was any.
    fn run_slice(&mut self, _cx: &mut Cx<'_>) -> bool {
        false
    }
    /// True if such work has come since.
    fn has_work(&self) -> bool {
        false
    }
    /// Handles the deadlines that have passed.
    fn expire(&mut self, _cx: &mut Cx<'_>) {}
    /// The time of the next call of [`expire`](Self::expire).
    fn next_deadline(&mut self, _links: &Links) -> Option<Instant> {
        None
    }
    /// As of [`Service`].
    fn log(&mut self, _text: String) {}
    /// As of [`Service`].
    fn closing(&mut self, _cx: &mut Cx<'_>) {}
    /// As of [`Service`]. Stops the transfers, and ends its operations.
    fn stop(&mut self, cx: &mut Cx<'_>);
    /// The sizes of its maps and queues.
    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes;
}

/// A service, and the transfers that it is host of.
pub(crate) struct Host<S> {
    pub(crate) service: S,
    pub(crate) transfers: TransferEngine,
    pool: Pool,
}

/// Starts a reactor that runs the service.
///
/// # Errors
/// As of [`session::spawn`](crate::session::spawn).
pub(crate) fn spawn<S>(
    config: ReactorConfig,
    make: impl FnOnce() -> S + Send + 'static,
) -> Result<Reactor<S::Command>>
where
    S: TransferService + 'static,
{
    crate::session::spawn(config, move || Host::new(make()))
}

impl<S: TransferService> Host<S> {
    pub(crate) fn new(service: S) -> Self {
        Self {
            service,
            transfers: TransferEngine::new(S::TRANSFERS_IN_FLIGHT),
            pool: Pool::default(),
        }
    }

    /// Calls the service, then hands it what has ended by that, until nothing more has.
    pub(crate) fn call<R>(
        &mut self,
        links: &mut Links,
        call: impl FnOnce(&mut S, &mut Cx<'_>) -> R,
    ) -> R {
        let cx = &mut Cx {
            links,
            transfers: &mut self.transfers,
            pool: &self.pool,
        };
        let result = call(&mut self.service, cx);
        loop {
            while let Some((owner, error)) = cx.transfers.next_late() {
                self.service.late(cx, owner, error);
            }
            while let Some(completion) = cx.transfers.next_completion() {
                self.service.transferred(cx, completion);
            }
            self.service.advance(cx);
            if !cx.transfers.has_completions() {
                return result;
            }
        }
    }

    fn transfer_message(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        message: (u8, Reader<'_>),
        data: &Payload,
    ) -> Result<()> {
        let asked = self.transfers.message(links, session, message, data)?;
        let Some(request) = asked else {
            return Ok(());
        };
        let source = match self.service.source(&request) {
            Err(error @ Error::Protocol(_)) => return Err(error),
            source => source,
        };
        self.transfers.serve(links, &request, source);
        Ok(())
    }

    /// Hands the service what has ended.
    fn drain(&mut self, links: &mut Links) {
        self.call(links, |_, _| ());
    }
}

impl<S: TransferService> Service for Host<S> {
    type Command = S::Command;

    fn command(&mut self, links: &mut Links, command: S::Command) {
        self.call(links, |service, cx| service.command(cx, command));
    }

    fn accept(&mut self, session: SessionKey, peer: &Identity) -> std::result::Result<(), String> {
        self.service.accept(session, peer)
    }

    fn dismissed(&mut self, session: SessionKey) {
        self.service.dismissed(session);
    }

    fn session_up(&mut self, links: &mut Links, session: SessionKey, peer: &Identity) {
        self.transfers.session_up(session);
        self.call(links, |service, cx| service.session_up(cx, session, peer));
    }

    fn session_down(&mut self, links: &mut Links, session: SessionKey, error: Error) {
        self.transfers.session_down(links, session, &error);
        self.call(links, |service, cx| {
            service.session_down(cx, session, error);
        });
    }

    fn data_path_changed(&mut self, links: &mut Links, session: SessionKey) {
        self.call(links, |service, cx| service.data_path_changed(cx, session));
    }

    fn streams_lost(&mut self, links: &mut Links, session: SessionKey) {
        self.transfers.streams_lost(links, session);
        self.drain(links);
    }

    fn message(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        header: &[u8],
        data: Payload,
    ) -> Result<()> {
        let mut header = Reader::new(header);
        let kind = header.u8()?;
        if Message::is_kind(kind) {
            self.transfer_message(links, session, (kind, header), &data)?;
            drop(data);
            self.drain(links);
            return Ok(());
        }
        self.call(links, |service, cx| {
            service.message(cx, session, (kind, header), data)
        })
    }

    fn done(&mut self, links: &mut Links, token: u64, result: std::result::Result<(), Status>) {
        self.transfers.read_ended(links, token, result);
        self.drain(links);
    }

    fn poll(&mut self, links: &mut Links) -> bool {
        let has_run = self.call(links, TransferService::run_slice);
        let has_moved = self.transfers.run_slice(links);
        if has_moved {
            self.drain(links);
        }
        has_run || has_moved || self.has_work()
    }

    fn has_work(&self) -> bool {
        self.transfers.has_work() || self.service.has_work()
    }

    fn timer(&mut self, links: &mut Links) -> Option<Instant> {
        // Before the service looks at deadlines, of which a transfer that has ended may meet one.
        if self.transfers.expire(links) {
            self.drain(links);
        }
        self.call(links, TransferService::expire);
        let deadlines = [
            self.transfers.next_deadline(),
            self.service.next_deadline(links),
            self.pool.expire(links.now()),
        ];
        deadlines.into_iter().flatten().min()
    }

    fn log(&mut self, text: String) {
        self.service.log(text);
    }

    fn closing(&mut self, links: &mut Links) {
        self.call(links, TransferService::closing);
    }

    fn stop(&mut self, links: &mut Links) {
        self.call(links, TransferService::stop);
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = self.service.sizes();
        sizes.push(("pooled memory", self.pool.len()));
        sizes.extend(self.transfers.sizes());
        sizes
    }
}

#[cfg(test)]
mod tests;
