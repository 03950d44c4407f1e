//! Destinations of the parts of streams, which go straight from the socket into memory. Services above register sinks;
//! a session finds them by the first bytes of a part's header.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};

use kvpipe_ucx::socket::Range;
use kvpipe_ucx::{Buffer, SharedBytes};

use super::Links;
use crate::error::Result;
use crate::ids::SessionKey;
use crate::net::codec::Reader;

/// The kind of a stream's parts. No other message comes as one.
pub(crate) const PART_KIND: u8 = 33;

/// Length of the name with which the header of a stream's parts begins: kind of message, id of the stream.
const NAME_LEN: usize = 1 + 8;

type StreamName = (SessionKey, [u8; NAME_LEN]);

/// Takes the bytes of one stream. Parts come one after the other on each connection of a session, so that several may be
/// under way at once. An error closes the session.
pub(crate) trait StreamSink {
    /// A part of so many bytes begins; `header` is what follows the stream's id. Returns the name of the part.
    fn begin(&mut self, header: Reader<'_>, len: usize) -> Result<u64>;
    /// Appends where the next bytes of a part go, at most `cap` of them, and returns the memory; none where
    /// [`put`](Self::put) takes them.
    fn next_ranges(&self, part: u64, cap: usize, ranges: &mut Vec<Range>) -> Option<Buffer>;
    /// So many bytes of a part have come there.
    fn placed(&mut self, part: u64, len: usize);
    /// Writes the next bytes of a part where they belong.
    fn put(&mut self, part: u64, data: SharedBytes<'_>) -> Result<()>;
}

pub(super) type SharedSink = Rc<RefCell<dyn StreamSink>>;

/// A part that a sink expects, until the sink is dropped.
pub(super) struct PartSink {
    sink: Weak<RefCell<dyn StreamSink>>,
    part: u64,
}

impl PartSink {
    pub(super) fn next_ranges(&self, cap: usize, ranges: &mut Vec<Range>) -> Option<Buffer> {
        let sink = self.sink.upgrade()?;
        sink.borrow().next_ranges(self.part, cap, ranges)
    }

    pub(super) fn placed(&self, len: usize) {
        if let Some(sink) = self.sink.upgrade() {
            sink.borrow_mut().placed(self.part, len);
        }
    }

    pub(super) fn put(&self, data: SharedBytes<'_>) -> Result<()> {
        let sink = self.sink.upgrade();
        sink.map_or(Ok(()), |sink| sink.borrow_mut().put(self.part, data))
    }
}

/// The sinks of a reactor.
#[derive(Clone, Default)]
pub(super) struct StreamSinks(Rc<RefCell<HashMap<StreamName, SharedSink>>>);

impl StreamSinks {
    /// Number of registered sinks.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.borrow().len()
    }

    /// Begins a part of a stream of this session; none if nothing takes it.
    ///
    /// # Errors
    /// The sink does not expect it.
    pub(super) fn begin(
        &self,
        session: SessionKey,
        header: &[u8],
        len: usize,
    ) -> Result<Option<PartSink>> {
        let Some((name, rest)) = header.split_first_chunk() else {
            return Ok(None);
        };
        let sinks = self.0.borrow();
        let Some(sink) = sinks.get(&(session, *name)) else {
            return Ok(None);
        };
        let part = sink.borrow_mut().begin(Reader::new(rest), len)?;
        Ok(Some(PartSink {
            sink: Rc::downgrade(sink),
            part,
        }))
    }
}

/// Keeps a sink registered.
pub(crate) struct RegisteredSink {
    sinks: StreamSinks,
    name: StreamName,
}

impl Drop for RegisteredSink {
    fn drop(&mut self) {
        self.sinks.0.borrow_mut().remove(&self.name);
    }
}

impl std::fmt::Debug for RegisteredSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegisteredSink").finish_non_exhaustive()
    }
}

impl Links {
    /// Gives the parts of a stream (messages of this kind and id) to `sink`, until the result is dropped.
    pub(crate) fn register_sink(
        &self,
        session: SessionKey,
        (kind, id): (u8, u64),
        sink: SharedSink,
    ) -> RegisteredSink {
        let mut name = [kind; NAME_LEN];
        name[1..].copy_from_slice(&id.to_le_bytes());
        let (sinks, name) = (self.sinks.clone(), (session, name));
        sinks.0.borrow_mut().insert(name, sink);
        RegisteredSink { sinks, name }
    }
}
