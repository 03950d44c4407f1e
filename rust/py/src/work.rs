//! `Work`: the result of an asynchronous call, for Python.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_core::blocks;
use kvpipe_core::completions::Completions as CoreCompletions;
use kvpipe_core::control::{ControlReply, Moment};
use kvpipe_core::entries::StoreInfo;
use kvpipe_core::entries::lookup::{Operation, Selected};
use kvpipe_core::entries::store;
use kvpipe_core::tensor::Received;
use kvpipe_core::work::{Then, Waited, Work as CoreWork};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::blocks::{Peer, Region};
use crate::buffer::{ReceivedBuffer, release_dropped};
use crate::error::{bad, to_py};
use crate::store::{OpenedValue, info_dict, page_tuple};

/// The results that an operation can have.
pub(crate) enum Kind {
    Nothing(CoreWork<()>),
    Received(CoreWork<Arc<Received>>),
    Bytes(CoreWork<u64>),
    Region(CoreWork<blocks::Region>),
    Peer(CoreWork<blocks::Peer>),
    Reply(CoreWork<ControlReply>),
    Inserted(Operation<()>),
    Selected(Operation<Selected>),
    Flag(CoreWork<bool>),
    Flags(CoreWork<Vec<bool>>),
    Operation(CoreWork<Option<u64>>),
    Opened(CoreWork<Option<Arc<store::OpenedValue>>>),
    Page(CoreWork<store::ValuePage>),
    StoreInfo(CoreWork<StoreInfo>),
}

/// Runs the same code for a work of any kind.
macro_rules! each {
    ($kind:expr, $work:ident => $do:expr) => {
        match $kind {
            Kind::Nothing($work) => $do,
            Kind::Received($work) => $do,
            Kind::Bytes($work) => $do,
            Kind::Region($work) => $do,
            Kind::Peer($work) => $do,
            Kind::Reply($work) => $do,
            Kind::Inserted($work) => $do,
            Kind::Selected($work) => $do,
            Kind::Flag($work) => $do,
            Kind::Flags($work) => $do,
            Kind::Operation($work) => $do,
            Kind::Opened($work) => $do,
            Kind::Page($work) => $do,
            Kind::StoreInfo($work) => $do,
        }
    };
}

#[pyclass(frozen)]
pub(crate) struct Work(Kind);

impl Work {
    pub(crate) fn new(kind: Kind) -> Self {
        Self(kind)
    }

    pub(crate) fn kind(&self) -> &Kind {
        &self.0
    }
}

/// No timeout: ten years, which can be added to the current time without overflow.
pub(crate) const FOREVER: Duration = Duration::from_secs(10 * 365 * 86400);

/// A timeout from Python, in seconds; `None` from [`FOREVER`] on.
pub(crate) fn duration(timeout: Option<f64>) -> PyResult<Option<Duration>> {
    let parse = |seconds: f64| {
        Duration::try_from_secs_f64(seconds).map_err(|_| {
            bad(format!(
                "timeout={seconds}: expected None or seconds, 0 or more"
            ))
        })
    };
    timeout
        .filter(|seconds| seconds.is_nan() || *seconds < FOREVER.as_secs_f64())
        .map(parse)
        .transpose()
}

/// The [`Then`] of a new work; `is_waited` is true if Python waits for it at once.
pub(crate) fn then(is_waited: bool) -> Then {
    if is_waited { Then::Wait } else { Then::GoOn }
}

#[pyclass(frozen)]
pub(crate) struct Completions(Arc<CoreCompletions>);

#[pymethods]
impl Completions {
    #[new]
    fn new() -> PyResult<Self> {
        let completions = CoreCompletions::new().map_err(to_py)?;
        Ok(Self(Arc::new(completions)))
    }

    fn fileno(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }

    fn drain(&self) -> Vec<u64> {
        self.0.drain()
    }
}

#[pymethods]
impl Work {
    fn is_completed(&self) -> bool {
        each!(&self.0, work => work.is_completed())
    }

    fn watch(&self, completions: &Completions, key: u64) -> bool {
        each!(&self.0, work => work.watch(&completions.0, key))
    }

    fn unwatch(&self, completions: &Completions, key: u64) {
        each!(&self.0, work => work.unwatch(&completions.0, key));
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        wait(
            py,
            timeout,
            |deadline| each!(&self.0, work => work.wait(deadline)),
        )
    }

    #[pyo3(signature = (timeout=None))]
    fn wait_settled(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        wait(
            py,
            timeout,
            |deadline| each!(&self.0, work => work.wait_settled(deadline)),
        )
    }

    /// Confirms a selected entry; without it, dropping the work puts the entry back.
    fn take(&self, py: Python<'_>) {
        if let Kind::Selected(work) = &self.0
            && let Some(Ok(Some(delivery))) = work.result()
        {
            py.detach(|| delivery.consume());
        }
    }

    /// Withdraws an insert or a select that waits for its other side.
    fn withdraw(&self, py: Python<'_>) {
        py.detach(|| match &self.0 {
            Kind::Inserted(work) => work.withdraw(),
            Kind::Selected(work) => work.withdraw(),
            _ => {}
        });
    }

    fn result<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        release_dropped(py);
        match &self.0 {
            Kind::Nothing(work) => {
                finished(work.result()).and_then(|()| py.None().into_bound_py_any(py))
            }
            Kind::Received(work) => received(py, finished(work.result())?),
            Kind::Bytes(work) => finished(work.result())?.into_bound_py_any(py),
            Kind::Region(work) => Region(finished(work.result())?).into_bound_py_any(py),
            Kind::Peer(work) => Peer(finished(work.result())?).into_bound_py_any(py),
            Kind::Reply(work) => reply(py, finished(work.result())?),
            Kind::Inserted(work) => {
                finished(work.result()).and_then(|()| py.None().into_bound_py_any(py))
            }
            Kind::Selected(work) => selected(py, &finished(work.result())?),
            Kind::Flag(work) => finished(work.result())?.into_bound_py_any(py),
            Kind::Flags(work) => finished(work.result())?.into_bound_py_any(py),
            Kind::Operation(work) => finished(work.result())?.into_bound_py_any(py),
            Kind::Opened(work) => finished(work.result())?
                .map(OpenedValue)
                .into_bound_py_any(py),
            Kind::Page(work) => page_tuple(py, &finished(work.result())?).into_bound_py_any(py),
            Kind::StoreInfo(work) => {
                info_dict(py, &finished(work.result())?)?.into_bound_py_any(py)
            }
        }
    }
}

/// Waits without the GIL for at most `timeout` seconds; false when they have passed. A signal handler may end the wait.
fn wait(
    py: Python<'_>,
    timeout: Option<f64>,
    wait: impl Fn(Option<Instant>) -> kvpipe_core::Result<Waited> + Sync,
) -> PyResult<bool> {
    let deadline = duration(timeout)?.map(|timeout| Instant::now() + timeout);
    loop {
        let waited = py.detach(|| wait(deadline)).map_err(to_py)?;
        py.check_signals()?;
        match waited {
            Waited::Done => {
                release_dropped(py);
                return Ok(true);
            }
            Waited::TimedOut => return Ok(false),
            Waited::Interrupted => {}
        }
    }
}

fn finished<T>(result: Option<kvpipe_core::Result<T>>) -> PyResult<T> {
    let result = result.ok_or_else(|| bad("not completed yet: wait() first"))?;
    result.map_err(to_py)
}

/// None, or a list of results of [`received`].
fn selected<'py>(py: Python<'py>, selected: &Selected) -> PyResult<Bound<'py, PyAny>> {
    let Some(delivery) = selected else {
        return py.None().into_bound_py_any(py);
    };
    let items = delivery.items().0.iter();
    items
        .map(|item| received(py, Arc::clone(item)))
        .collect::<PyResult<Vec<_>>>()?
        .into_bound_py_any(py)
}

/// A document as its text, a moment as `(kind, remaining_s, reason)`.
fn reply(py: Python<'_>, reply: ControlReply) -> PyResult<Bound<'_, PyAny>> {
    let seconds = |remaining: Option<Duration>| remaining.map(|it| it.as_secs_f64());
    let moment = |kind, remaining, reason: String| (kind, seconds(remaining), reason);
    match reply {
        ControlReply::Description(text) | ControlReply::Checked(text) => text.into_bound_py_any(py),
        ControlReply::Result(text) => text.into_bound_py_any(py),
        ControlReply::Known(is_known) => is_known.into_bound_py_any(py),
        ControlReply::Moment(event) => match event {
            Moment::Due(remaining) => moment("due", Some(remaining), String::new()),
            Moment::Finished(remaining) => moment("finished", remaining, String::new()),
            Moment::Watched => moment("watched", None, String::new()),
            Moment::Ended(reason) => moment("ended", None, reason),
        }
        .into_bound_py_any(py),
    }
}

/// `(family, dtype, shape, buffer or None)`.
fn received(py: Python<'_>, received: Arc<Received>) -> PyResult<Bound<'_, PyAny>> {
    let meta = &received.meta;
    let (family, dtype, shape) = (meta.family, meta.dtype.clone(), meta.shape.clone());
    let buffer = received
        .buffer
        .is_some()
        .then(|| ReceivedBuffer::new(Arc::clone(&received)));
    (family, dtype, shape, buffer).into_bound_py_any(py)
}
