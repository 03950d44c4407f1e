//! Where the payloads of streams go while UCX still has them in its receive buffer, which saves a copy. Services above
//! register sinks; the UCX worker finds them by how the header of a message begins.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use kvpipe_ucx::{Placer, SharedBytes};

use super::ReactorContext;
use crate::error::Result;
use crate::ids::SessionKey;
use crate::net::codec::Reader;

/// How the header of a stream's messages begins: session, kind of message, id of the stream.
const NAME_LEN: usize = 16 + 1 + 8;

type StreamName = [u8; NAME_LEN];

/// Takes the payloads of one stream.
pub(crate) trait StreamSink {
    /// Writes a payload where it belongs; `header` is what follows the stream's id. A payload that is refused becomes an
    /// event, which is where its error is reported.
    ///
    /// It is called by C and must not panic.
    fn place(&mut self, header: Reader<'_>, data: SharedBytes<'_>) -> Result<()>;
}

type SharedSink = Rc<RefCell<dyn StreamSink>>;

/// The sinks of a reactor.
#[derive(Clone, Default)]
pub(super) struct StreamSinks(Rc<RefCell<HashMap<StreamName, SharedSink>>>);

impl StreamSinks {
    /// What the worker offers payloads to.
    pub(super) fn placer(&self) -> Placer {
        let sinks = self.clone();
        Box::new(move |header, data| sinks.place(header, data).unwrap_or(false))
    }

    /// How many are registered.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.borrow().len()
    }

    fn place(&self, header: &[u8], data: SharedBytes<'_>) -> Option<bool> {
        let (name, rest) = header.split_first_chunk()?;
        let sinks = self.0.try_borrow().ok()?;
        let mut sink = sinks.get(name)?.try_borrow_mut().ok()?;
        Some(sink.place(Reader::new(rest), data).is_ok())
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

impl ReactorContext {
    /// Offers the payloads of a stream (messages of this kind and id) to `sink`, until the result is dropped.
    pub(crate) fn register_sink(
        &self,
        session: SessionKey,
        (kind, id): (u8, u64),
        sink: SharedSink,
    ) -> RegisteredSink {
        let header = self.header(session, kind).u64(id).finish();
        let mut name = [0; NAME_LEN];
        name.copy_from_slice(&header);
        let sinks = self.stream_sinks();
        sinks.0.borrow_mut().insert(name, sink);
        RegisteredSink { sinks, name }
    }
}

#[cfg(test)]
impl ReactorContext {
    /// What UCX offers payloads to.
    pub(crate) fn placer(&self) -> impl Fn(&[u8], &[u8]) -> bool {
        let place = self.stream_sinks().placer();
        move |header, data| place(header, data.into())
    }
}
