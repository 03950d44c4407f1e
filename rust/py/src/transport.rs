//! `Transport`: between processes, or the in-memory twin, for pipes and agents.

use std::path::PathBuf;

use kvpipe_core::transport::{self, MemoryPath};
use pyo3::prelude::*;

use crate::error::bad;
use crate::search;

#[pyclass(frozen)]
pub(crate) struct Transport(transport::Transport);

impl Transport {
    pub(crate) fn core(&self) -> transport::Transport {
        self.0.clone()
    }
}

#[pymethods]
impl Transport {
    #[staticmethod]
    fn host(wheel_dir: Option<PathBuf>) -> Self {
        Self(transport::Transport::Host(search(wheel_dir)))
    }

    #[staticmethod]
    fn memory(data_path: &str) -> PyResult<Self> {
        let data_path = match data_path {
            "remote_read" => MemoryPath::RemoteRead,
            "stream" => MemoryPath::Stream,
            other => {
                return Err(bad(format!(
                    "data_path={other:?}: expected 'remote_read' or 'stream'"
                )));
            }
        };
        Ok(Self(transport::Transport::Memory(data_path)))
    }
}
