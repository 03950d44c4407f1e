//! `Transport`: what pipes and agents move their bytes with.

use std::path::PathBuf;

use kvpipe_core::transport::{self, MemoryRoad};
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
    fn ucx(wheel_dir: Option<PathBuf>) -> Self {
        Self(transport::Transport::Ucx(search(wheel_dir)))
    }

    #[staticmethod]
    fn memory(road: &str) -> PyResult<Self> {
        let road = match road {
            "get" => MemoryRoad::Get,
            "messages" => MemoryRoad::Messages,
            other => {
                return Err(bad(format!("road={other:?}: expected 'get' or 'messages'")));
            }
        };
        Ok(Self(transport::Transport::Memory(road)))
    }
}
