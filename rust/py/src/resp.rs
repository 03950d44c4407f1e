//! `_kvpipe.RespConnection`: large values of Valkey and Redis between a server and Python buffers.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use kvpipe_core::Error;
use kvpipe_resp::{
    Closer, Connection, PartOutcome, Reply, Subscription, Tls, Waited, Waiter, address_of,
};
use pyo3::buffer::PyBuffer;
use pyo3::import_exception;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PyString};

use crate::error::{bad, to_py};
use crate::work::duration;

import_exception!(kvpipe.store.valkey.errors, RefusedError);

/// Longest bound for an answer, so that a deadline can be computed.
const MAX_TIMEOUT_S: f64 = 86_400.0;

type Part = (Vec<u8>, usize);

/// The authorities that connections trust, and the certificate of this client.
#[pyclass(frozen)]
pub(crate) struct RespTls(Tls);

#[pymethods]
impl RespTls {
    #[new]
    #[pyo3(signature = (*, ca_file=None, cert_file=None, key_file=None))]
    fn new(
        ca_file: Option<PathBuf>,
        cert_file: Option<PathBuf>,
        key_file: Option<PathBuf>,
    ) -> PyResult<Self> {
        Tls::new(
            ca_file.as_deref(),
            cert_file.as_deref(),
            key_file.as_deref(),
        )
        .map(Self)
        .map_err(|error| error_at("", error))
    }
}

/// A connection that one call uses at a time.
#[pyclass(frozen)]
pub(crate) struct RespConnection {
    address: String,
    connection: Mutex<Connection>,
    closer: Closer,
}

#[pymethods]
impl RespConnection {
    #[new]
    #[pyo3(signature = (host, port, timeout_s, tls=None))]
    fn new(
        py: Python<'_>,
        host: String,
        port: u16,
        timeout_s: f64,
        tls: Option<&Bound<'_, RespTls>>,
    ) -> PyResult<Self> {
        if !(timeout_s > 0.0 && timeout_s <= MAX_TIMEOUT_S) {
            return Err(bad(format!("timeout_s={timeout_s}: expected 0 to a day")));
        }
        let timeout = Duration::from_secs_f64(timeout_s);
        let address = address_of(&host, port);
        let tls = tls.map(|tls| &tls.get().0);
        let connection = py
            .detach(|| Connection::connect(&host, port, timeout, tls))
            .map_err(|error| error_at(&address, error))?;
        Ok(Self {
            address,
            closer: connection.closer(),
            connection: Mutex::new(connection),
        })
    }

    #[getter]
    fn is_idle(&self) -> PyResult<bool> {
        Ok(self.exclusive()?.is_idle())
    }

    fn subscribe(&self) -> PyResult<RespSubscription> {
        let subscription = self.exclusive()?.subscribe();
        Ok(RespSubscription {
            address: self.address.clone(),
            subscription: subscription.map_err(|error| error_at(&self.address, error))?,
        })
    }

    fn send(&self, py: Python<'_>, commands: Vec<Vec<Vec<u8>>>) -> PyResult<()> {
        let mut guard = self.exclusive()?;
        let connection = &mut *guard;
        let commands: Vec<Vec<&[u8]>> = commands
            .iter()
            .map(|command| command.iter().map(Vec::as_slice).collect())
            .collect();
        py.detach(|| connection.send(&commands))
            .map_err(|error| error_at(&self.address, error))
    }

    fn receive<'py>(&self, py: Python<'py>, num_replies: usize) -> PyResult<Bound<'py, PyList>> {
        let mut guard = self.exclusive()?;
        let connection = &mut *guard;
        let replies = py
            .detach(|| connection.receive(num_replies))
            .map_err(|error| error_at(&self.address, error))?;
        list_of(py, replies)
    }

    #[staticmethod]
    fn write_parts(
        py: Python<'_>,
        connections: Vec<Py<Self>>,
        memory: PyBuffer<u8>,
        parts: Vec<Part>,
        ttl_ms: u64,
    ) -> PyResult<Vec<Bound<'_, PyAny>>> {
        check(&memory, &parts)?;
        #[allow(unsafe_code)]
        // SAFETY: `memory` keeps `len_bytes` contiguous bytes at `buf_ptr` allocated until it is dropped below. The slice
        // is only handed to the kernel, which copies: no code here depends on bytes that a thread of the user changes.
        let mut rest =
            unsafe { std::slice::from_raw_parts(first_byte(&memory), memory.len_bytes()) };
        let parts: Vec<(&[u8], &[u8])> = parts
            .iter()
            .map(|(key, num_bytes)| {
                let (part, after) = rest.split_at(*num_bytes);
                rest = after;
                (key.as_slice(), part)
            })
            .collect();
        transfer(py, &connections, |connections| {
            kvpipe_resp::write_parts(connections, &parts, ttl_ms)
        })
    }

    #[staticmethod]
    fn read_parts(
        py: Python<'_>,
        connections: Vec<Py<Self>>,
        memory: PyBuffer<u8>,
        parts: Vec<Part>,
    ) -> PyResult<Vec<Bound<'_, PyAny>>> {
        check(&memory, &parts)?;
        if memory.readonly() {
            return Err(bad("the memory is read-only, but has to be written"));
        }
        #[allow(unsafe_code)]
        // SAFETY: as in `write_parts`; the exporter says that the bytes may be written, and the kernel writes them.
        let mut rest =
            unsafe { std::slice::from_raw_parts_mut(first_byte(&memory), memory.len_bytes()) };
        let mut split = Vec::with_capacity(parts.len());
        for (key, num_bytes) in &parts {
            let (part, after) = rest.split_at_mut(*num_bytes);
            rest = after;
            split.push((key.as_slice(), part));
        }
        transfer(py, &connections, |connections| {
            kvpipe_resp::read_parts(connections, split)
        })
    }

    fn close(&self) {
        self.closer.close();
    }
}

impl RespConnection {
    fn exclusive(&self) -> PyResult<MutexGuard<'_, Connection>> {
        match self.connection.try_lock() {
            Ok(connection) => Ok(connection),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(bad(format!(
                "the connection to {} is in use by another call",
                self.address
            ))),
        }
    }
}

/// Wakes callers that wait for messages of channels.
#[pyclass(frozen)]
pub(crate) struct RespSubscription {
    address: String,
    subscription: Subscription,
}

#[pymethods]
impl RespSubscription {
    #[getter]
    fn has_received(&self) -> bool {
        self.subscription.has_received()
    }

    #[getter]
    fn has_ended(&self) -> bool {
        self.subscription.has_ended()
    }

    fn listen(&self, py: Python<'_>, channel: &[u8]) -> PyResult<RespWaiter> {
        let waiter = py.detach(|| self.subscription.listen(channel));
        Ok(RespWaiter {
            address: self.address.clone(),
            waiter: waiter.map_err(|error| error_at(&self.address, error))?,
        })
    }

    fn close(&self) {
        self.subscription.close();
    }
}

/// One caller that waits for messages of a channel.
#[pyclass(frozen)]
pub(crate) struct RespWaiter {
    address: String,
    waiter: Waiter,
}

#[pymethods]
impl RespWaiter {
    fn begin(&self) -> PyResult<bool> {
        self.waiter
            .begin()
            .map_err(|error| error_at(&self.address, error))
    }

    /// A signal handler of Python may end the wait.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let deadline = duration(timeout)?.map(|timeout| Instant::now() + timeout);
        loop {
            let waited = py.detach(|| self.waiter.wait(deadline));
            py.check_signals()?;
            if waited.map_err(|error| error_at(&self.address, error))? != Waited::Interrupted {
                return Ok(());
            }
        }
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.waiter.close());
    }
}

fn transfer<'py>(
    py: Python<'py>,
    connections: &[Py<RespConnection>],
    run: impl FnOnce(&mut [&mut Connection]) -> kvpipe_resp::Result<Vec<PartOutcome>> + Send,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let addresses: Vec<&str> = connections
        .iter()
        .map(|each| each.get().address.as_str())
        .collect();
    let guards = connections.iter().map(|each| each.get().exclusive());
    let mut guards = guards.collect::<PyResult<Vec<_>>>()?;
    let mut exclusive: Vec<&mut Connection> = guards.iter_mut().map(|guard| &mut **guard).collect();
    let outcomes = py
        .detach(|| run(&mut exclusive))
        .map_err(|error| error_at(addresses.first().unwrap_or(&""), error))?;
    let outcomes = outcomes.into_iter();
    Ok(outcomes.map(|outcome| outcome_to_py(py, outcome)).collect())
}

fn outcome_to_py(py: Python<'_>, outcome: PartOutcome) -> Bound<'_, PyAny> {
    match outcome {
        PartOutcome::Done => py.None().into_bound(py),
        PartOutcome::Missing => PyInt::new(py, -1).into_any(),
        PartOutcome::WrongSize(num_bytes) => PyInt::new(py, num_bytes).into_any(),
        PartOutcome::Refused(text) => PyString::new(py, &text).into_any(),
    }
}

fn reply_to_py(py: Python<'_>, reply: Reply) -> PyResult<Bound<'_, PyAny>> {
    Ok(match reply {
        Reply::Status(bytes) | Reply::Bulk(bytes) => PyBytes::new(py, &bytes).into_any(),
        Reply::Error(text) => PyString::new(py, &text).into_any(),
        Reply::Integer(number) => PyInt::new(py, number).into_any(),
        Reply::Nil => py.None().into_bound(py),
        Reply::Array(replies) => list_of(py, replies)?.into_any(),
    })
}

fn list_of(py: Python<'_>, replies: Vec<Reply>) -> PyResult<Bound<'_, PyList>> {
    let replies = replies.into_iter().map(|reply| reply_to_py(py, reply));
    PyList::new(py, replies.collect::<PyResult<Vec<_>>>()?)
}

/// Refuses memory that the parts do not fill exactly.
fn check(memory: &PyBuffer<u8>, parts: &[Part]) -> PyResult<()> {
    if !memory.is_c_contiguous() {
        return Err(bad("the memory is not contiguous"));
    }
    let num_bytes = parts
        .iter()
        .try_fold(0_usize, |sum, (_, num_bytes)| sum.checked_add(*num_bytes));
    if num_bytes != Some(memory.len_bytes()) {
        let len = memory.len_bytes();
        return Err(bad(format!(
            "the parts do not fill the memory of {len} bytes"
        )));
    }
    Ok(())
}

/// The first byte; empty memory may have no address, and a slice needs one.
fn first_byte(memory: &PyBuffer<u8>) -> *mut u8 {
    let start = memory.buf_ptr().cast::<u8>();
    if start.is_null() {
        return std::ptr::NonNull::dangling().as_ptr();
    }
    start
}

fn error_at(address: &str, error: kvpipe_resp::Error) -> PyErr {
    to_py(match error {
        kvpipe_resp::Error::Refused(text) => return RefusedError::new_err(text),
        kvpipe_resp::Error::Exhausted(text) => Error::Exhausted(text),
        kvpipe_resp::Error::Config(text) => Error::Config(text),
        kvpipe_resp::Error::Connect(text) => Error::Connect(text),
        kvpipe_resp::Error::Lost(reason) | kvpipe_resp::Error::Timeout(reason) => Error::PeerLost {
            peer: address.to_owned(),
            reason,
        },
        kvpipe_resp::Error::Protocol(text) => Error::Protocol(format!("{address}: {text}")),
    })
}
