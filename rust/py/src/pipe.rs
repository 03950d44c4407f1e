//! `PipeEnd`: one end of a pipe, for `kvpipe.pipe`, which adds tensors.

use std::time::Duration;

use kvpipe_core::pipe::{Deadline, Pipe};
use kvpipe_core::reactor::default_busy_poll;
use kvpipe_core::tensor::Meta;
use pyo3::prelude::*;

use crate::buffer::{from_python, release_dropped};
use crate::error::{bad, to_py};
use crate::log;
use crate::token::ListenerTokens;
use crate::transport::Transport;
use crate::work::{Kind, Work, duration, then};

pub(crate) type MetaTuple = (u8, String, Vec<u64>);

pub(crate) fn meta((family, dtype, shape): MetaTuple) -> Meta {
    Meta {
        family,
        dtype,
        shape,
    }
}

#[pyclass(frozen)]
pub(crate) struct PipeEnd(Pipe);

#[pymethods]
impl PipeEnd {
    #[staticmethod]
    fn listen(
        py: Python<'_>,
        address: &str,
        token: ListenerTokens,
        transport: &Transport,
        busy_poll_us: Option<u64>,
    ) -> PyResult<Self> {
        log::begin(py)?;
        let (transport, busy_poll) = (transport.core(), busy_poll(busy_poll_us));
        py.detach(|| Pipe::listen(address, token.core(), transport, busy_poll))
            .map(Self)
            .map_err(to_py)
    }

    #[staticmethod]
    fn connect(
        py: Python<'_>,
        address: &str,
        token: &[u8],
        transport: &Transport,
        integrity: &str,
        busy_poll_us: Option<u64>,
        timeout: f64,
    ) -> PyResult<(Self, Work)> {
        log::begin(py)?;
        let timeout = duration(Some(timeout))?.unwrap_or(Duration::from_secs(86400));
        let integrity = integrity.parse().map_err(to_py)?;
        let (transport, busy_poll) = (transport.core(), busy_poll(busy_poll_us));
        let connected =
            py.detach(|| Pipe::connect(address, token, transport, integrity, busy_poll, timeout));
        let (pipe, connected) = connected.map_err(to_py)?;
        Ok((Self(pipe), Work::new(Kind::Nothing(connected))))
    }

    fn send(
        &self,
        py: Python<'_>,
        tensor: MetaTuple,
        data: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        is_waited: bool,
    ) -> PyResult<Work> {
        release_dropped(py);
        let (buffer, deadline) = (
            from_python(data, false)?,
            Deadline::after(duration(timeout)?),
        );
        let sent = py
            .detach(|| self.0.send(meta(tensor), buffer, deadline, then(is_waited)))
            .map_err(to_py)?;
        Ok(Work::new(Kind::Nothing(sent)))
    }

    fn receive(
        &self,
        py: Python<'_>,
        out: Option<(MetaTuple, Bound<'_, PyAny>)>,
        timeout: Option<f64>,
        is_waited: bool,
    ) -> PyResult<Work> {
        release_dropped(py);
        let out = match out {
            Some((tensor, data)) => Some((meta(tensor), from_python(&data, true)?)),
            None => None,
        };
        let deadline = Deadline::after(duration(timeout)?);
        let received = py
            .detach(|| self.0.receive(out, deadline, then(is_waited)))
            .map_err(to_py)?;
        Ok(Work::new(Kind::Received(received)))
    }

    fn withdraw(&self, receive: &Work) -> PyResult<()> {
        match receive.kind() {
            Kind::Received(work) => self.0.withdraw(work).map_err(to_py),
            _ => Err(bad("only a receive can be withdrawn")),
        }
    }

    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Work>> {
        let deadline = Deadline::after(duration(timeout)?);
        let closed = py.detach(|| self.0.close(deadline)).map_err(to_py)?;
        release_dropped(py);
        Ok(closed.map(|work| Work::new(Kind::Nothing(work))))
    }

    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.stop());
        release_dropped(py);
        self.0.check_reads_ended().map_err(to_py)
    }

    #[getter]
    fn address(&self) -> Option<String> {
        self.0.address().map(|address| address.to_string())
    }

    /// Reason for which large tensors take a slower data path than this machine allows; empty if they do not.
    #[getter]
    fn advice(&self) -> &'static str {
        self.0.info().advice
    }

    /// `(state, peer, transport, num_tensors, num_bytes, in_flight)`.
    fn info(&self) -> (&'static str, String, String, u64, u64, usize) {
        let info = self.0.info();
        (
            info.state,
            info.peer,
            info.transport,
            info.num_tensors,
            info.num_bytes,
            info.in_flight,
        )
    }
}

impl Drop for PipeEnd {
    /// Waits for the reactor's end without the GIL, so that other Python threads run.
    fn drop(&mut self) {
        Python::try_attach(|py| {
            py.detach(|| self.0.stop());
            release_dropped(py);
        });
    }
}

fn busy_poll(us: Option<u64>) -> Duration {
    us.map_or_else(default_busy_poll, Duration::from_micros)
}
