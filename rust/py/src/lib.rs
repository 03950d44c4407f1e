//! The extension `kvpipe._kvpipe`: a thin layer between Python and `kvpipe-core`. Its documentation for users is
//! `python/kvpipe/_kvpipe.pyi`. Calls that may wait release the GIL; kvpipe's native threads never take it.
#![deny(unsafe_code)]
// The stub documents the functions; pyo3 takes arguments by value.
#![allow(
    missing_docs,
    clippy::needless_pass_by_value,
    clippy::too_many_arguments
)]

mod agent;
mod blocks;
mod buffer;
mod cache;
mod control;
mod error;
mod ids;
mod log;
mod lookup;
mod pipe;
mod resp;
mod serde;
mod store;
mod token;
mod trace;
mod transport;
mod work;

use std::path::PathBuf;

use kvpipe_ucx::Search;
use pyo3::prelude::*;

/// Locations to search for UCX: `KVPIPE_UCX_LIB`, then the wheel that Python has found.
fn search(wheel_dir: Option<PathBuf>) -> Search {
    let explicit = std::env::var_os("KVPIPE_UCX_LIB")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from);
    Search {
        explicit,
        wheel_dir,
    }
}

#[pymodule(gil_used = false)]
mod _kvpipe {
    use pyo3::prelude::*;
    use pyo3::types::PyDict;

    #[pymodule_export]
    use super::agent::Agent;
    #[pymodule_export]
    use super::blocks::{Peer, Plan, ReadyBlocks, Region};
    #[pymodule_export]
    use super::buffer::{
        CudaEvent, CudaMemory, ManualEvent, ReceivedBuffer, cuda_device_of, cuda_is_exportable,
    };
    #[pymodule_export]
    use super::cache::CacheLayers;
    #[pymodule_export]
    use super::control::Control;
    #[pymodule_export]
    use super::log::{begin_log, drain_log};
    #[pymodule_export]
    use super::lookup::LookupBuffer;
    #[pymodule_export]
    use super::pipe::PipeEnd;
    #[pymodule_export]
    use super::resp::{RespConnection, RespSubscription, RespTls, RespWaiter};
    #[pymodule_export]
    use super::serde::{serde_copy, serde_decode, serde_encode, serde_max_bytes};
    #[pymodule_export]
    use super::store::{OpenedValue, StoreClient, StoreServer};
    #[pymodule_export]
    use super::trace::Trace;
    #[pymodule_export]
    use super::transport::Transport;
    #[pymodule_export]
    use super::work::{Completions, Work};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        super::log::install(module)
    }

    #[pyfunction]
    fn joined_checksum(beginning: u64, rest: u64, num_bytes: u64) -> u64 {
        kvpipe_core::checksum::joined(beginning, rest, num_bytes)
    }

    #[pyfunction]
    fn checksums(
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        starts: Vec<usize>,
        num_bytes: usize,
    ) -> PyResult<Vec<u64>> {
        let buffer = super::buffer::from_python(memory, false)?;
        let sum = |&start| {
            buffer
                .bytes(start, num_bytes)
                .map(kvpipe_core::checksum::of_shared)
                .ok_or(start)
        };
        let sums = py.detach(|| starts.iter().map(sum).collect::<Result<Vec<u64>, usize>>());
        let len = buffer.len();
        drop(buffer);
        super::buffer::release_dropped(py);
        sums.map_err(|start| {
            super::error::bad(format!(
                "{num_bytes} bytes at {start} are not in a buffer of {len}"
            ))
        })
    }

    #[pyfunction]
    #[pyo3(signature = (wheel_dir=None))]
    fn ucx_info(
        py: Python<'_>,
        wheel_dir: Option<std::path::PathBuf>,
    ) -> PyResult<Bound<'_, PyDict>> {
        super::log::begin(py)?;
        let library = kvpipe_ucx::Library::load(&super::search(wheel_dir))
            .map_err(|error| super::error::to_py(kvpipe_core::Error::from(error)))?;
        let context =
            kvpipe_ucx::Context::new(std::sync::Arc::clone(&library), &kvpipe_ucx::Config::new())
                .map_err(|status| super::error::to_py(kvpipe_core::Error::from(status)))?;
        let (major, minor, patch) = library.version();
        let info = PyDict::new(py);
        info.set_item("version", format!("{major}.{minor}.{patch}"))?;
        info.set_item("path", library.path())?;
        info.set_item("has_cuda", context.has_cuda())?;
        Ok(info)
    }

    #[pyfunction]
    fn remedy_of_difference(field: &str, ours: &str, theirs: &str) -> Option<String> {
        kvpipe_core::remedy_of_difference(field, ours, theirs)
    }

    #[pyfunction]
    fn has_rdma_devices() -> bool {
        kvpipe_ucx::has_rdma_devices()
    }
}
