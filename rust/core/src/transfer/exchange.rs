//! Buffers that the two sides of a session read from each other, on top of a [`TransferEngine`]: what each side exposes, and
//! the memory that arrives. Lookup buffers and stores move their bytes by it.

use std::collections::HashMap;
use std::sync::Arc;

use kvpipe_ucx::Buffer;

use super::exposed::{BufferDescription, ExposedBuffer};
use super::region::Layout;
use super::source::SourceRequest;
use super::{Handled, TransferEngine};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::integrity::Integrity;
use crate::net::codec::Reader;
use crate::session::{Payload, ReactorContext};
use crate::transport::{Memory, Pool};

/// Buffers from this size are kept in memory of a pool with huge pages: the first use of a page costs more than the copy.
/// Measured for 64 MiB: 36 ms into new pages, 15 ms into new huge pages, 5 ms into used pages.
pub(crate) const HUGE: usize = 4 << 20;

/// Transfers of a reactor, and what its peers may read by them. Each source is one buffer, under an id of the service's
/// choice.
#[derive(Debug)]
pub(crate) struct BufferExchange {
    pub(crate) engine: TransferEngine,
    pub(crate) pool: Pool,
    exposed: HashMap<SessionKey, HashMap<u64, ExposedBuffer>>,
}

impl BufferExchange {
    /// An exchange that reads so many buffers of one peer at once.
    pub(crate) fn new(max_in_flight: usize) -> Self {
        Self {
            engine: TransferEngine::new(max_in_flight),
            pool: Pool::default(),
            exposed: HashMap::new(),
        }
    }

    /// What its maps hold, and those of the engine.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let exposed = self.exposed.values().map(HashMap::len).sum();
        let mut sizes = vec![
            ("exposed buffers", exposed),
            ("pooled memory", self.pool.len()),
        ];
        sizes.extend(self.engine.sizes());
        sizes
    }

    pub(crate) fn session_up(&mut self, session: SessionKey) {
        self.exposed.insert(session, HashMap::new());
        self.engine.session_up(session);
    }

    pub(crate) fn session_down(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        error: &Error,
    ) {
        self.exposed.remove(&session);
        self.engine.session_down(cx, session, error);
    }

    /// The reactor has ended: nothing is exposed any more.
    pub(crate) fn stop(&mut self, error: &Error) {
        self.engine.stop(error);
        self.exposed.clear();
    }

    /// Handles a message of a transfer, of a kind that [`Message::is_kind`](super::Message::is_kind) knows.
    pub(crate) fn message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        (kind, header): (u8, Reader<'_>),
        data: &Payload,
    ) -> Result<()> {
        let handled = self.engine.message(cx, session, (kind, header), data)?;
        if let Handled::Request(request) = handled {
            let source = self.requested(&request);
            self.engine.serve(cx, &request, source);
        }
        Ok(())
    }

    fn requested(&self, request: &SourceRequest) -> Result<(Arc<Memory>, Layout)> {
        let session = self.exposed.get(&request.session);
        let Some(exposed) = session.and_then(|exposed| exposed.get(&request.source)) else {
            let source = request.source;
            let text = format!("buffer {source} is not exposed any more");
            return Err(Error::Config(text));
        };
        exposed.requested(request)
    }

    /// Registers a buffer, and lets a peer read it until [`withdraw`](Self::withdraw).
    pub(crate) fn expose(
        &mut self,
        cx: &ReactorContext,
        session: SessionKey,
        source: u64,
        buffer: Buffer,
        integrity: Integrity,
    ) -> Result<BufferDescription> {
        let len = buffer.len();
        let memory = cx.register(buffer)?;
        self.expose_memory(cx, session, source, (memory, len), integrity)
    }

    /// Lets a peer read the first bytes of registered memory.
    pub(crate) fn expose_memory(
        &mut self,
        cx: &ReactorContext,
        session: SessionKey,
        source: u64,
        (memory, len): (Arc<Memory>, usize),
        integrity: Integrity,
    ) -> Result<BufferDescription> {
        let (exposed, described) = ExposedBuffer::of(cx, session, memory, len, integrity)?;
        if let Some(sources) = self.exposed.get_mut(&session) {
            self.engine.expose(session, source, &exposed);
            sources.insert(source, exposed);
        }
        Ok(described)
    }

    /// Nothing of a source is sent or may be read any more.
    pub(crate) fn withdraw(&mut self, cx: &mut ReactorContext, session: SessionKey, source: u64) {
        let sources = self.exposed.get_mut(&session);
        if sources.is_some_and(|sources| sources.remove(&source).is_some()) {
            self.engine.withdraw_source(cx, session, source);
        }
    }

    /// Registered memory for at least `len` bytes, with any content.
    ///
    /// # Errors
    /// As of [`Pool::take`].
    pub(crate) fn memory(&self, cx: &ReactorContext, len: usize) -> Result<Arc<Memory>> {
        if len < HUGE {
            cx.register(Buffer::zeroed(len))
        } else {
            self.pool.take(len, |fresh| cx.register(fresh))
        }
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
