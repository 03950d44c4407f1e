//! `LookupBuffer`: for `kvpipe.lookup_buffer`, which adds tensors.

use std::sync::Arc;
use std::time::Duration;

use kvpipe_core::entries::lookup::{self, Items, LookupQuery, NUM_ITEMS};
use kvpipe_core::tensor::{Meta, Received};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::{from_python, release_dropped};
use crate::error::{bad, to_py};
use crate::log;
use crate::pipe::{MetaTuple, meta};
use crate::token::ListenerTokens;
use crate::transport::Transport;
use crate::work::{Kind, Work, duration, then};

#[pyclass(frozen)]
pub(crate) struct LookupBuffer(lookup::LookupBuffer);

fn item(tensor: MetaTuple, data: &Bound<'_, PyAny>) -> PyResult<Arc<Received>> {
    let meta = meta(tensor);
    let buffer = (meta != Meta::default())
        .then(|| from_python(data, false))
        .transpose()?;
    Ok(Arc::new(Received { meta, buffer }))
}

fn items(tensors: Vec<(MetaTuple, Bound<'_, PyAny>)>) -> PyResult<Items> {
    let items: Vec<_> = tensors
        .into_iter()
        .map(|(tensor, data)| item(tensor, &data))
        .collect::<PyResult<_>>()?;
    let items = items
        .try_into()
        .map_err(|_| bad(format!("an entry has {NUM_ITEMS} tensors")))?;
    Ok(Items(items))
}

#[pymethods]
impl LookupBuffer {
    #[new]
    fn new(capacity_bytes: u64) -> Self {
        Self(lookup::LookupBuffer::new(capacity_bytes))
    }

    #[staticmethod]
    fn connect(
        py: Python<'_>,
        addresses: Vec<String>,
        token: &[u8],
        transport: &Transport,
        is_checksummed: bool,
        timeout: f64,
    ) -> PyResult<(Self, Work)> {
        log::begin(py)?;
        let timeout = duration(Some(timeout))?.unwrap_or(Duration::from_secs(86400));
        let transport = transport.core();
        let connected = py.detach(|| {
            lookup::LookupBuffer::connect(addresses, token, transport, is_checksummed, timeout)
        });
        let (client, connected) = connected.map_err(to_py)?;
        Ok((Self(client), Work::new(Kind::Nothing(connected))))
    }

    fn serve(
        &self,
        py: Python<'_>,
        address: &str,
        token: ListenerTokens,
        transport: &Transport,
        is_checksummed: bool,
    ) -> PyResult<()> {
        log::begin(py)?;
        let transport = transport.core();
        py.detach(|| {
            self.0
                .serve(address, token.core(), transport, is_checksummed)
        })
        .map_err(to_py)
    }

    #[getter]
    fn address(&self) -> String {
        self.0.address()
    }

    fn insert(
        &self,
        py: Python<'_>,
        tokens: PyBuffer<i64>,
        tensors: Vec<(MetaTuple, Bound<'_, PyAny>)>,
        timeout: Option<f64>,
        is_waited: bool,
    ) -> PyResult<Work> {
        let (tokens, items, timeout) = (tokens.to_vec(py)?, items(tensors)?, duration(timeout)?);
        let inserted = py.detach(|| self.0.insert(tokens, items, timeout, then(is_waited)));
        release_dropped(py);
        Ok(Work::new(Kind::Inserted(inserted.map_err(to_py)?)))
    }

    fn select(
        &self,
        py: Python<'_>,
        tokens: Option<PyBuffer<i64>>,
        timeout: Option<f64>,
        is_waited: bool,
        is_peek: bool,
    ) -> PyResult<Work> {
        let query = match tokens {
            Some(tokens) => LookupQuery::Tokens(tokens.to_vec(py)?),
            None => LookupQuery::Any,
        };
        let (timeout, then) = (duration(timeout)?, then(is_waited));
        let begin = if is_peek {
            lookup::LookupBuffer::peek
        } else {
            lookup::LookupBuffer::select
        };
        let selected = py
            .detach(|| begin(&self.0, query, timeout, then))
            .map_err(to_py)?;
        Ok(Work::new(Kind::Selected(selected)))
    }

    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let info = self.0.info();
        let dict = PyDict::new(py);
        dict.set_item("state", info.state)?;
        dict.set_item("num_inserted", info.num_inserted)?;
        dict.set_item("num_taken", info.num_consumed)?;
        dict.set_item("num_waiting", info.num_waiting)?;
        dict.set_item("num_entries", info.num_entries)?;
        dict.set_item("num_leased", info.num_leased)?;
        dict.set_item("num_bytes", info.num_bytes)?;
        dict.set_item("capacity_bytes", info.capacity_bytes)?;
        dict.set_item("transport", info.transport)?;
        Ok(dict)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
        release_dropped(py);
    }
}

impl Drop for LookupBuffer {
    /// Waits for the reactor's end without the GIL, so that other Python threads run.
    fn drop(&mut self) {
        Python::try_attach(|py| {
            py.detach(|| self.0.close());
            release_dropped(py);
        });
    }
}
