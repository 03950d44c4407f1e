//! `Control`: the control plane for the scheduler role and the proxy.

use kvpipe_core::FailureCause;
use kvpipe_core::control::{
    self, AllowedHosts, ControlEvent, ControlQuery, ControlTimeouts, HandoffUpdate, Opening, Rank,
    SequenceState,
};
use kvpipe_core::ids::HandoffId;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::agent::{id, timeouts};
use crate::error::{bad, to_py};
use crate::log;
use crate::token::ListenerTokens;
use crate::trace::Trace;
use crate::work::{FOREVER, Kind, Work, duration};

#[pyclass(frozen)]
pub(crate) struct Control(control::Control);

#[pymethods]
impl Control {
    #[new]
    #[pyo3(signature = (listen, token, engine_id="", fingerprint=vec![], silence=None, lease=30.0,
        open_timeout=30.0, handoff_timeout=300.0))]
    fn new(
        py: Python<'_>,
        listen: Option<&str>,
        token: ListenerTokens,
        engine_id: &str,
        fingerprint: Vec<(String, String)>,
        silence: Option<f64>,
        lease: f64,
        open_timeout: f64,
        handoff_timeout: f64,
    ) -> PyResult<Self> {
        log::begin(py)?;
        let bounded =
            |seconds: f64| duration(Some(seconds)).map(|duration| duration.unwrap_or(FOREVER));
        let timeouts = ControlTimeouts {
            session: timeouts(silence)?,
            lease: bounded(lease)?,
            open: bounded(open_timeout)?,
            handoff: bounded(handoff_timeout)?,
        };
        let control = py.detach(|| {
            control::Control::new(listen, token.core(), engine_id, fingerprint, timeouts)
        });
        control.map(Self).map_err(to_py)
    }

    #[getter]
    fn address(&self) -> Option<String> {
        self.0.address().map(|address| address.to_string())
    }

    fn trace_to(&self, trace: &Trace) -> PyResult<()> {
        self.0.trace_to(trace.core()).map_err(to_py)
    }

    fn describe_as(&self, json: String) -> PyResult<()> {
        self.0.describe_as(json).map_err(to_py)
    }

    /// `networks`: address and length of the prefix.
    fn allow_checks(&self, names: Vec<String>, networks: Vec<(String, u8)>) -> PyResult<()> {
        let network = |(address, prefix): (String, u8)| match address.parse() {
            Ok(address) => Ok((address, prefix)),
            Err(_) => Err(bad("a network has an IP address")),
        };
        let networks = networks.into_iter().map(network).collect::<PyResult<_>>()?;
        let hosts = AllowedHosts { names, networks };
        self.0.allow_checks(hosts).map_err(to_py)
    }

    fn expect(&self, handoff: &[u8]) -> PyResult<()> {
        self.0.expect(id(handoff)?).map_err(to_py)
    }

    #[pyo3(signature = (handoff, prompt_hash, num_tokens, ranks, adapter="", stages=vec![]))]
    fn open(
        &self,
        handoff: &[u8],
        prompt_hash: &[u8],
        num_tokens: u32,
        ranks: Vec<(String, Vec<u8>)>,
        adapter: &str,
        stages: Vec<Vec<u32>>,
    ) -> PyResult<()> {
        let prompt_hash = hash(prompt_hash)?;
        let rank = |(address, incarnation): (String, Vec<u8>)| {
            Ok(Rank {
                address,
                incarnation: id(&incarnation)?,
            })
        };
        let ranks = ranks.into_iter().map(rank).collect::<PyResult<_>>()?;
        self.0
            .open(
                id(handoff)?,
                Opening {
                    prompt_hash,
                    num_tokens,
                    ranks,
                    stages,
                    adapter: adapter.to_owned(),
                },
            )
            .map_err(to_py)
    }

    fn progress(&self, handoff: &[u8], remaining: f64) -> PyResult<()> {
        let remaining = duration(Some(remaining))?.unwrap_or(FOREVER);
        self.0.progress(id(handoff)?, remaining).map_err(to_py)
    }

    fn finish(
        &self,
        handoff: &[u8],
        output_ids: Vec<u32>,
        finish_reason: String,
        num_cached_tokens: u32,
        sampling_hash: &[u8],
    ) -> PyResult<()> {
        let sampling_hash = hash(sampling_hash)?;
        let state = SequenceState {
            output_ids,
            finish_reason,
            num_cached_tokens,
            sampling_hash,
        };
        self.0.finish(id(handoff)?, state).map_err(to_py)
    }

    fn withdraw(&self, handoff: &[u8], reason: &str) -> PyResult<()> {
        self.0.withdraw(id(handoff)?, reason).map_err(to_py)
    }

    fn watch(&self, handoff: &[u8], producer: &str) -> PyResult<()> {
        self.0.watch(id(handoff)?, producer).map_err(to_py)
    }

    fn unwatch(&self, handoff: &[u8], is_acknowledged: bool) -> PyResult<()> {
        self.0.unwatch(id(handoff)?, is_acknowledged).map_err(to_py)
    }

    fn set_result(&self, handoff: &[u8], json: String) -> PyResult<()> {
        self.0.set_result(id(handoff)?, json).map_err(to_py)
    }

    fn ask_description(&self, address: &str, timeout: f64) -> PyResult<Work> {
        self.query(address, ControlQuery::Describe, timeout)
    }

    fn ask_release(&self, address: &str, handoff: &[u8], timeout: f64) -> PyResult<Work> {
        self.query(address, ControlQuery::Release(id(handoff)?), timeout)
    }

    fn ask_result(&self, address: &str, handoff: &[u8], timeout: f64) -> PyResult<Work> {
        self.query(address, ControlQuery::Result(id(handoff)?), timeout)
    }

    fn ask_subscription(
        &self,
        address: &str,
        handoff: &[u8],
        lead: f64,
        timeout: f64,
    ) -> PyResult<Work> {
        let (handoff, lead) = (id(handoff)?, duration(Some(lead))?.unwrap_or(FOREVER));
        self.query(address, ControlQuery::Subscribe { handoff, lead }, timeout)
    }

    fn report_progress(
        &self,
        address: &str,
        handoff: &[u8],
        remaining: f64,
        timeout: f64,
    ) -> PyResult<Work> {
        let (handoff, remaining) = (id(handoff)?, duration(Some(remaining))?.unwrap_or(FOREVER));
        self.query(
            address,
            ControlQuery::Progress { handoff, remaining },
            timeout,
        )
    }

    fn ask_check(&self, address: &str, producer: String, timeout: f64) -> PyResult<Work> {
        self.query(address, ControlQuery::Check(producer), timeout)
    }

    fn ask_watched(&self, address: &str, handoff: &[u8], timeout: f64) -> PyResult<Work> {
        self.query(address, ControlQuery::Watched(id(handoff)?), timeout)
    }

    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        self.0
            .drain()
            .iter()
            .map(|event| to_dict(py, event))
            .collect()
    }

    fn wait(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.wait())
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

impl Control {
    fn query(&self, address: &str, query: ControlQuery, timeout: f64) -> PyResult<Work> {
        let timeout = duration(Some(timeout))?.unwrap_or(FOREVER);
        self.0
            .query(address, query, timeout)
            .map(|work| Work::new(Kind::Reply(work)))
            .map_err(to_py)
    }
}

fn to_dict<'py>(py: Python<'py>, event: &ControlEvent) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let set = |kind: &str, handoff: &HandoffId| {
        dict.set_item("event", kind)?;
        dict.set_item("handoff", handoff.as_slice())
    };
    match event {
        ControlEvent::Released { handoff, reason } => {
            set("released", handoff)?;
            dict.set_item("reason", reason)?;
        }
        ControlEvent::Updated { handoff, update } => {
            set(update.name(), handoff)?;
            match update {
                HandoffUpdate::Opened(opening) => set_opening(&dict, opening)?,
                HandoffUpdate::Finished(state) => {
                    dict.set_item("output_ids", &state.output_ids)?;
                    dict.set_item("finish_reason", &state.finish_reason)?;
                    dict.set_item("num_cached_tokens", state.num_cached_tokens)?;
                    dict.set_item("sampling_hash", state.sampling_hash.as_slice())?;
                }
                HandoffUpdate::Ended(reason) => {
                    dict.set_item("reason", reason)?;
                    dict.set_item("cause", FailureCause::Ended.name())?;
                    dict.set_item("is_withdrawn", true)?;
                }
            }
        }
        ControlEvent::Lost {
            handoff,
            reason,
            cause,
        } => {
            set("ended", handoff)?;
            dict.set_item("reason", reason)?;
            dict.set_item("cause", cause.name())?;
            dict.set_item("is_withdrawn", false)?;
        }
        ControlEvent::Log(text) => {
            dict.set_item("event", "log")?;
            dict.set_item("text", text)?;
        }
    }
    Ok(dict)
}

fn hash(bytes: &[u8]) -> PyResult<[u8; 32]> {
    bytes.try_into().map_err(|_| bad("a hash has 32 bytes"))
}

fn set_opening(dict: &Bound<'_, PyDict>, opening: &Opening) -> PyResult<()> {
    dict.set_item("prompt_hash", opening.prompt_hash.as_slice())?;
    dict.set_item("num_tokens", opening.num_tokens)?;
    dict.set_item("adapter", &opening.adapter)?;
    let ranks: Vec<(&str, &[u8])> = opening
        .ranks
        .iter()
        .map(|rank| (rank.address.as_str(), rank.incarnation.as_slice()))
        .collect();
    dict.set_item("ranks", ranks)?;
    dict.set_item("stages", &opening.stages)
}

impl Drop for Control {
    /// Waits for the reactor's end without the GIL, so that other Python threads run.
    fn drop(&mut self) {
        Python::try_attach(|py| py.detach(|| self.0.close()));
    }
}
