//! `Agent`: block transfers and the worker role's side of handoffs.

use std::os::fd::RawFd;
use std::time::Instant;

use kvpipe_core::blocks::handoff::{Event, LoadPart, LoadReport, LoadRequest};
use kvpipe_core::blocks::{self, AgentConfig, Notification, Options};
use kvpipe_core::ids::HandoffId;
use kvpipe_core::region::Slice;
use kvpipe_core::session::SessionTimeouts;
use kvpipe_core::work::Waited;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::blocks::{Counts, Peer, Plan, ReadyBlocks, Region, counts};
use crate::buffer::{device_event, from_python, release_dropped};
use crate::error::{bad, to_py};
use crate::ids::ids;
use crate::log;
use crate::token::ListenerTokens;
use crate::trace::Trace;
use crate::transport::Transport;
use crate::work::{FOREVER, Kind, Work, duration};

/// An id from Python: 16 bytes.
pub(crate) fn id(bytes: &[u8]) -> PyResult<HandoffId> {
    bytes
        .try_into()
        .map_err(|_| bad(format!("an id of {} bytes; 16 are expected", bytes.len())))
}

pub(crate) fn timeouts(silence: Option<f64>) -> PyResult<SessionTimeouts> {
    let default = SessionTimeouts::default();
    if silence.is_some_and(|seconds| seconds <= 0.0) {
        return Err(bad("silence: expected None or seconds, more than 0"));
    }
    let silence = duration(silence)?.unwrap_or(default.silence);
    Ok(SessionTimeouts {
        silence,
        heartbeat: default.heartbeat.min(silence / 3),
        ..default
    })
}

#[pyclass(frozen)]
pub(crate) struct Agent(blocks::Agent);

#[pymethods]
impl Agent {
    #[new]
    #[pyo3(signature = (listen, token, transport, engine_id="", fingerprint=vec![], silence=None, integrity="auto", first_block_timeout=300.0))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of a private class"
    )]
    fn new(
        py: Python<'_>,
        listen: &str,
        token: ListenerTokens,
        transport: &Transport,
        engine_id: &str,
        fingerprint: Vec<(String, String)>,
        silence: Option<f64>,
        integrity: &str,
        first_block_timeout: f64,
    ) -> PyResult<Self> {
        log::begin(py)?;
        let integrity = integrity.parse().map_err(to_py)?;
        let (timeouts, transport) = (timeouts(silence)?, transport.core());
        let first_block_timeout = duration(Some(first_block_timeout))?.unwrap_or(FOREVER);
        let agent = py.detach(|| {
            blocks::Agent::new(AgentConfig {
                listen,
                token: token.core(),
                transport,
                engine_id,
                fingerprint,
                timeouts,
                integrity,
                first_block_timeout,
            })
        });
        agent.map(Self).map_err(to_py)
    }

    #[getter]
    fn address(&self) -> Option<String> {
        self.0.address().map(|address| address.to_string())
    }

    #[getter]
    fn incarnation(&self) -> [u8; 16] {
        self.0.incarnation()
    }

    #[pyo3(signature = (name, data, block_bytes, stride, is_writable=false))]
    fn register(
        &self,
        py: Python<'_>,
        name: &str,
        data: &Bound<'_, PyAny>,
        block_bytes: u64,
        stride: u64,
        is_writable: bool,
    ) -> PyResult<Work> {
        let buffer = from_python(data, true)?;
        let registered = py.detach(|| {
            if is_writable {
                self.0.register_writable(name, buffer, block_bytes, stride)
            } else {
                self.0.register(name, buffer, block_bytes, stride)
            }
        });
        let work = registered.map_err(to_py)?;
        Ok(Work::new(Kind::Region(work)))
    }

    #[pyo3(signature = (region, timeout=None))]
    fn close_region(&self, region: &Region, timeout: Option<f64>) -> PyResult<Work> {
        let timeout = duration(timeout)?;
        let work = self.0.close_region(&region.0, timeout).map_err(to_py)?;
        Ok(Work::new(Kind::Nothing(work)))
    }

    fn connect(&self, address: &str) -> PyResult<Work> {
        self.0
            .connect(address)
            .map(|work| Work::new(Kind::Peer(work)))
            .map_err(to_py)
    }

    fn add_peer(&self, metadata: &[u8]) -> PyResult<Work> {
        self.0
            .add_peer(metadata)
            .map(|work| Work::new(Kind::Peer(work)))
            .map_err(to_py)
    }

    fn metadata<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.metadata())
    }

    fn peers(&self) -> Vec<Peer> {
        self.0.peers().into_iter().map(Peer).collect()
    }

    fn stats(&self) -> Counts {
        counts(self.0.stats())
    }

    #[getter]
    fn num_regions(&self) -> usize {
        self.0.num_regions()
    }

    fn prepare(
        &self,
        py: Python<'_>,
        peer: &Peer,
        region: &Region,
        local_ids: &Bound<'_, PyAny>,
        remote_region: &str,
        remote_ids: &Bound<'_, PyAny>,
    ) -> PyResult<Plan> {
        let (local_ids, remote_ids) = (ids(local_ids)?, ids(remote_ids)?);
        let (local, remote) = ((&region.0, local_ids), (remote_region, remote_ids));
        let plan = py.detach(|| self.0.prepare(&peer.0, local, remote));
        plan.map(Plan).map_err(to_py)
    }

    #[pyo3(signature = (plan, notify=None, timeout=None))]
    fn read(
        &self,
        py: Python<'_>,
        plan: &Plan,
        notify: Option<&[u8]>,
        timeout: Option<f64>,
    ) -> PyResult<Work> {
        let options = options(notify, timeout)?;
        moving(py.detach(|| self.0.read(&plan.0, options)))
    }

    #[pyo3(signature = (plan, notify=None, timeout=None))]
    fn write(
        &self,
        py: Python<'_>,
        plan: &Plan,
        notify: Option<&[u8]>,
        timeout: Option<f64>,
    ) -> PyResult<Work> {
        let options = options(notify, timeout)?;
        moving(py.detach(|| self.0.write(&plan.0, options)))
    }

    fn notify(&self, peer: &Peer, tag: &[u8]) -> PyResult<Work> {
        let work = self.0.notify(&peer.0, tag.to_vec()).map_err(to_py)?;
        Ok(Work::new(Kind::Nothing(work)))
    }

    #[pyo3(signature = (timeout=None))]
    fn notifications<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<(Peer, Bound<'py, PyBytes>)>> {
        let deadline = duration(timeout)?.map(|timeout| Instant::now() + timeout);
        loop {
            let come = self.0.notifications().map_err(to_py)?;
            if !come.is_empty() {
                let pair = |it: Notification| (Peer(it.peer), PyBytes::new(py, &it.tag));
                return Ok(come.into_iter().map(pair).collect());
            }
            let waited = py.detach(|| self.0.wait_for_notifications(deadline));
            py.check_signals()?;
            if waited.map_err(to_py)? == Waited::TimedOut {
                return Ok(Vec::new());
            }
        }
    }

    fn notifications_fileno(&self) -> RawFd {
        self.0.notifications_fd()
    }

    #[pyo3(signature = (ready, regions, event=None))]
    fn mark_ready(
        &self,
        ready: &ReadyBlocks,
        regions: Vec<PyRef<'_, Region>>,
        event: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let regions: Vec<_> = regions.iter().map(|region| region.0.clone()).collect();
        let marked = match event {
            None => self.0.mark_ready(&ready.0, &regions),
            Some(event) => self
                .0
                .mark_ready_after(device_event(event)?, &ready.0, &regions),
        };
        marked.map_err(to_py)
    }

    fn end(&self, handoff: &[u8], reason: &str) -> PyResult<()> {
        self.0.end(id(handoff)?, reason).map_err(to_py)
    }

    #[pyo3(signature = (
        handoff, producer, incarnation, parts, is_committed, event=None, *, rank=0, destination_slice=None, source_slice=None,
        is_shared=false
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn load(
        &self,
        handoff: &[u8],
        producer: String,
        incarnation: &[u8],
        parts: Vec<(Vec<PyRef<'_, Region>>, u32, Vec<u32>)>,
        is_committed: bool,
        event: Option<&Bound<'_, PyAny>>,
        rank: u16,
        destination_slice: Option<(u32, u32)>,
        source_slice: Option<(u32, u32)>,
        is_shared: bool,
    ) -> PyResult<()> {
        let (handoff, incarnation) = (id(handoff)?, id(incarnation)?);
        let parts = parts
            .into_iter()
            .map(|(regions, first, block_ids)| LoadPart {
                regions: Some(regions.iter().map(|region| region.0.clone()).collect()),
                first,
                block_ids,
            });
        let slice = |(index, count)| Slice { index, count };
        let request = LoadRequest {
            handoff,
            producer,
            incarnation,
            parts: parts.collect(),
            is_committed,
            rank,
            destination_slice: destination_slice.map(slice),
            source_slice: source_slice.map(slice),
            is_shared,
        };
        let begun = match event {
            None => self.0.load(request),
            Some(event) => self.0.load_after(device_event(event)?, request),
        };
        begun.map_err(to_py)
    }

    fn commit(&self, handoff: &[u8]) -> PyResult<()> {
        self.0.commit(id(handoff)?).map_err(to_py)
    }

    fn cancel(&self, handoff: &[u8], reason: &str, is_withdrawn: bool) -> PyResult<()> {
        let handoff = id(handoff)?;
        self.0.cancel(handoff, reason, is_withdrawn).map_err(to_py)
    }

    fn trace_to(&self, trace: &Trace) -> PyResult<()> {
        self.0.trace_to(trace.core()).map_err(to_py)
    }

    #[getter]
    fn num_leased(&self) -> usize {
        self.0.num_leased()
    }

    #[getter]
    fn num_sessions(&self) -> (usize, usize) {
        self.0.num_sessions()
    }

    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        self.0
            .drain()
            .iter()
            .map(|event| to_dict(py, event))
            .collect()
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.close());
        release_dropped(py);
        self.0.check_reads_ended().map_err(to_py)
    }
}

fn options(notify: Option<&[u8]>, timeout: Option<f64>) -> PyResult<Options> {
    Ok(Options {
        notify: notify.map(<[u8]>::to_vec),
        timeout: duration(timeout)?,
    })
}

fn moving(work: kvpipe_core::Result<kvpipe_core::work::Work<u64>>) -> PyResult<Work> {
    work.map(|work| Work::new(Kind::Bytes(work))).map_err(to_py)
}

fn to_dict<'py>(py: Python<'py>, event: &Event) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let set = |kind: &str, handoff: &HandoffId| {
        dict.set_item("event", kind)?;
        dict.set_item("handoff", handoff.as_slice())
    };
    let set_report = |kind: &str, report: &LoadReport| {
        set(kind, &report.handoff)?;
        dict.set_item("rank", report.rank)?;
        let counts = &report.counts;
        dict.set_item("transport", &report.transport.name)?;
        dict.set_item("transport_reason", &report.transport.reason)?;
        dict.set_item("elapsed_s", report.elapsed.as_secs_f64())?;
        dict.set_item("backlog_s", counts.backlog.as_secs_f64())?;
        dict.set_item("num_bytes", counts.num_bytes)?;
        dict.set_item("num_received", counts.num_received)?;
        dict.set_item("num_missing", counts.num_missing)?;
        dict.set_item("num_retried", counts.num_retried)?;
        dict.set_item("num_validated", counts.num_validated)?;
        dict.set_item("num_compared", counts.num_compared)?;
        dict.set_item("num_corrupt", counts.num_corrupt)
    };
    match event {
        Event::BlocksVerified(report) => set_report("blocks_verified", report)?,
        Event::LoadCompleted(report) => set_report("load_completed", report)?,
        Event::LoadFailed(report, failure) => {
            set_report("load_failed", report)?;
            dict.set_item("missing", &failure.missing)?;
            dict.set_item("reason", &failure.reason)?;
            dict.set_item("cause", failure.cause.name())?;
        }
        Event::Acknowledged { handoff } => set("acknowledged", handoff)?,
        Event::Log(text) => {
            dict.set_item("event", "log")?;
            dict.set_item("text", text)?;
        }
    }
    Ok(dict)
}

impl Drop for Agent {
    /// Waits for the reactor's end without the GIL, so that other Python threads run.
    fn drop(&mut self) {
        Python::try_attach(|py| {
            py.detach(|| self.0.close());
            release_dropped(py);
        });
    }
}
