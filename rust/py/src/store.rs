//! `StoreServer` and `StoreClient`: for `kvpipe.store`, which adds what a value is.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvpipe_core::entries::StoreInfo;
use kvpipe_core::entries::store::{self, DiskConfig, ValuePage};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict};

use crate::buffer::{from_python, release_dropped};
use crate::error::to_py;
use crate::log;
use crate::token::ListenerTokens;
use crate::transport::Transport;
use crate::work::{Kind, Work, duration, then};

/// Stands for a lease of any length.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 86400);

#[pyclass(frozen)]
pub(crate) struct StoreServer(store::StoreServer);

#[pymethods]
impl StoreServer {
    #[new]
    fn new(
        py: Python<'_>,
        address: &str,
        token: ListenerTokens,
        transport: &Transport,
        capacity_bytes: u64,
        quota_bytes: Option<u64>,
        reservation_s: f64,
        disk: Option<(PathBuf, u64)>,
    ) -> PyResult<Self> {
        log::begin(py)?;
        let disk = disk.map(|(directory, capacity_bytes)| DiskConfig {
            directory,
            capacity_bytes,
        });
        let (transport, reservation) = (transport.core(), lease(reservation_s)?);
        py.detach(|| {
            store::StoreServer::serve(
                address,
                token.core(),
                transport,
                capacity_bytes,
                quota_bytes,
                reservation,
                disk,
            )
        })
        .map(Self)
        .map_err(to_py)
    }

    #[getter]
    fn address(&self) -> String {
        self.0.address()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info_dict(py, &self.0.stats().map_err(to_py)?)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

impl Drop for StoreServer {
    /// Waits for the reactor's end without the GIL, so that other Python threads run.
    fn drop(&mut self) {
        Python::try_attach(|py| py.detach(|| self.0.close()));
    }
}

/// A value that a client has open.
#[pyclass(frozen)]
pub(crate) struct OpenedValue(pub(crate) Arc<store::OpenedValue>);

#[pymethods]
impl OpenedValue {
    #[getter]
    fn operation(&self) -> u64 {
        self.0.operation
    }

    #[getter]
    fn num_bytes(&self) -> u64 {
        self.0.num_bytes
    }

    #[getter]
    fn record<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.record)
    }

    fn read_parts(&self, py: Python<'_>, parts: Vec<Bound<'_, PyAny>>) -> PyResult<Option<u64>> {
        let parts = parts.iter().map(|part| from_python(part, true));
        let parts = parts.collect::<PyResult<Vec<_>>>()?;
        let checksum = py.detach(|| self.0.read_parts(&parts));
        drop(parts);
        release_dropped(py);
        Ok(checksum)
    }
}

#[pyclass(frozen)]
pub(crate) struct StoreClient(store::StoreClient);

fn copied(keys: &[PyBackedBytes]) -> Vec<Vec<u8>> {
    keys.iter().map(|key| key.to_vec()).collect()
}

fn lease(seconds: f64) -> PyResult<Duration> {
    Ok(duration(Some(seconds))?.unwrap_or(LONGEST))
}

#[pymethods]
impl StoreClient {
    #[staticmethod]
    fn connect(
        py: Python<'_>,
        address: String,
        token: &[u8],
        transport: &Transport,
        timeout: f64,
    ) -> PyResult<(Self, Work)> {
        log::begin(py)?;
        let timeout = duration(Some(timeout))?.unwrap_or(Duration::from_secs(86400));
        let transport = transport.core();
        let connected =
            py.detach(|| store::StoreClient::connect(address, token, transport, timeout));
        let (client, connected) = connected.map_err(to_py)?;
        Ok((Self(client), Work::new(Kind::Nothing(connected))))
    }

    #[getter]
    fn address(&self) -> &str {
        self.0.address()
    }

    #[getter]
    fn transport(&self) -> String {
        self.0.transport()
    }

    fn exists(&self, keys: Vec<PyBackedBytes>) -> PyResult<Work> {
        let work = self.0.exists(copied(&keys)).map_err(to_py)?;
        Ok(Work::new(Kind::Flags(work)))
    }

    fn reserve(
        &self,
        key: PyBackedBytes,
        num_bytes: u64,
        ttl: Option<f64>,
        timeout: Option<f64>,
    ) -> PyResult<(Work, u64)> {
        let (ttl, timeout) = (duration(ttl)?, duration(timeout)?);
        let reserved = self.0.reserve(key.to_vec(), num_bytes, ttl, timeout);
        let (work, operation) = reserved.map_err(to_py)?;
        Ok((Work::new(Kind::Operation(work)), operation))
    }

    fn write(&self, py: Python<'_>, reservation: u64, data: &Bound<'_, PyAny>) -> PyResult<Work> {
        let buffer = from_python(data, false)?;
        let written = py.detach(|| self.0.write(reservation, buffer));
        release_dropped(py);
        Ok(Work::new(Kind::Nothing(written.map_err(to_py)?)))
    }

    fn commit(&self, reservation: u64, record: PyBackedBytes) -> PyResult<Work> {
        let committed = self.0.commit(reservation, record.to_vec());
        Ok(Work::new(Kind::Nothing(committed.map_err(to_py)?)))
    }

    fn put(
        &self,
        py: Python<'_>,
        key: PyBackedBytes,
        data: &Bound<'_, PyAny>,
        record: PyBackedBytes,
        ttl: Option<f64>,
    ) -> PyResult<Work> {
        let (buffer, ttl) = (from_python(data, false)?, duration(ttl)?);
        let put = py.detach(|| self.0.put(key.to_vec(), buffer, record.to_vec(), ttl));
        release_dropped(py);
        Ok(Work::new(Kind::Flag(put.map_err(to_py)?)))
    }

    fn select(&self, key: PyBackedBytes, timeout: Option<f64>) -> PyResult<(Work, u64)> {
        let selected = self.0.select(key.to_vec(), duration(timeout)?);
        let (work, operation) = selected.map_err(to_py)?;
        Ok((Work::new(Kind::Opened(work)), operation))
    }

    fn take(
        &self,
        key: PyBackedBytes,
        lease_s: f64,
        timeout: Option<f64>,
    ) -> PyResult<(Work, u64)> {
        let taken = self
            .0
            .take(key.to_vec(), lease(lease_s)?, duration(timeout)?);
        let (work, operation) = taken.map_err(to_py)?;
        Ok((Work::new(Kind::Opened(work)), operation))
    }

    fn read(&self, py: Python<'_>, value: &OpenedValue, out: &Bound<'_, PyAny>) -> PyResult<Work> {
        let buffer = from_python(out, true)?;
        let read = py.detach(|| self.0.read(&value.0, buffer));
        release_dropped(py);
        Ok(Work::new(Kind::Nothing(read.map_err(to_py)?)))
    }

    fn release(&self, operation: u64, is_waited: bool) -> PyResult<Work> {
        let released = self.0.release(operation, then(is_waited));
        let released = released.map_err(to_py)?;
        Ok(Work::new(Kind::Nothing(released)))
    }

    fn renew(&self, take: u64, lease_s: f64) -> PyResult<Work> {
        let renewed = self.0.renew(take, lease(lease_s)?).map_err(to_py)?;
        Ok(Work::new(Kind::Nothing(renewed)))
    }

    fn acknowledge(&self, take: u64) -> PyResult<Work> {
        let acknowledged = self.0.acknowledge(take).map_err(to_py)?;
        Ok(Work::new(Kind::Nothing(acknowledged)))
    }

    fn delete(&self, keys: Vec<PyBackedBytes>) -> PyResult<Work> {
        let deleted = self.0.delete(copied(&keys)).map_err(to_py)?;
        Ok(Work::new(Kind::Bytes(deleted)))
    }

    fn list(&self, prefix: PyBackedBytes, after: u64) -> PyResult<Work> {
        let page = self.0.list(prefix.to_vec(), after).map_err(to_py)?;
        Ok(Work::new(Kind::Page(page)))
    }

    fn stats(&self) -> PyResult<Work> {
        let stats = self.0.stats().map_err(to_py)?;
        Ok(Work::new(Kind::StoreInfo(stats)))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
        release_dropped(py);
    }
}

impl Drop for StoreClient {
    /// As of [`StoreServer`].
    fn drop(&mut self) {
        Python::try_attach(|py| {
            py.detach(|| self.0.close());
            release_dropped(py);
        });
    }
}

/// The counters by their names in `kvpipe.store.StoreStats`.
pub(crate) fn info_dict<'py>(py: Python<'py>, info: &StoreInfo) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("num_values", info.num_values)?;
    dict.set_item("num_bytes", info.num_bytes)?;
    dict.set_item("capacity_bytes", info.capacity_bytes)?;
    dict.set_item("num_reserved", info.num_reserved)?;
    dict.set_item("num_leased", info.num_leased)?;
    dict.set_item("num_waiting", info.num_waiting)?;
    dict.set_item("num_committed", info.num_committed)?;
    dict.set_item("num_hits", info.num_hits)?;
    dict.set_item("num_misses", info.num_misses)?;
    dict.set_item("num_evicted", info.num_evicted)?;
    dict.set_item("num_expired", info.num_expired)?;
    dict.set_item("num_corrupt", info.num_corrupt)?;
    dict.set_item("num_clients", info.num_clients)?;
    dict.set_item("num_disk_values", info.num_disk_values)?;
    dict.set_item("num_disk_bytes", info.num_disk_bytes)?;
    dict.set_item("disk_capacity_bytes", info.disk_capacity_bytes)?;
    dict.set_item("num_loaded", info.num_loaded)?;
    dict.set_item("num_disk_failures", info.num_disk_failures)?;
    dict.set_item("committed_bytes", info.committed_bytes)?;
    dict.set_item("hit_bytes", info.hit_bytes)?;
    dict.set_item("num_waits", info.num_waits)?;
    dict.set_item("num_fenced", info.num_fenced)?;
    dict.set_item("num_lost", info.num_lost)?;
    dict.set_item("num_over_quota", info.num_over_quota)?;
    Ok(dict)
}

type ListedTuple<'py> = (Bound<'py, PyBytes>, u64, bool);

/// `([(key, num_bytes, is_leased)], next)`.
pub(crate) fn page_tuple<'py>(
    py: Python<'py>,
    page: &ValuePage,
) -> (Vec<ListedTuple<'py>>, Option<u64>) {
    let values = page.values.iter().map(|value| {
        let key = PyBytes::new(py, &value.key);
        (key, value.num_bytes, value.is_leased)
    });
    (values.collect(), page.next)
}
