//! The handles that an agent makes: regions, peers and plans.

use std::sync::Arc;

use kvpipe_core::blocks::{self, handoff};
use kvpipe_core::region::RemoteRegion;
use pyo3::prelude::*;

use crate::agent::id;
use crate::error::to_py;

/// `(bytes_read, bytes_written, num_reads, num_writes, in_flight)`.
pub(crate) type Counts = (u64, u64, u64, u64, u64);

pub(crate) fn counts(stats: blocks::Stats) -> Counts {
    (
        stats.bytes_read,
        stats.bytes_written,
        stats.num_reads,
        stats.num_writes,
        stats.in_flight,
    )
}

#[pyclass(frozen)]
pub(crate) struct Region(pub(crate) blocks::Region);

#[pymethods]
impl Region {
    #[getter]
    fn num_blocks(&self) -> u64 {
        self.0.layout().num_blocks
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

#[pyclass(frozen)]
pub(crate) struct Peer(pub(crate) blocks::Peer);

#[pymethods]
impl Peer {
    #[getter]
    fn session_key(&self) -> u64 {
        self.0.session()
    }

    #[getter]
    fn address(&self) -> &str {
        self.0.address()
    }

    #[getter]
    fn transport(&self) -> String {
        self.0.transport()
    }

    #[getter]
    fn transport_reason(&self) -> String {
        self.0.transport_reason()
    }

    #[getter]
    fn lost(&self) -> Option<String> {
        self.0.lost()
    }

    fn regions(&self) -> Vec<(String, u64, u64, String, bool)> {
        let regions = self.0.regions();
        let describe = |region: &Arc<RemoteRegion>| {
            let layout = &region.layout;
            let (name, device) = (region.name.clone(), region.device.clone());
            let is_writable = region.is_writable;
            (
                name,
                layout.num_blocks,
                layout.block_bytes,
                device,
                is_writable,
            )
        };
        regions.iter().map(describe).collect()
    }

    fn stats(&self) -> Counts {
        counts(self.0.stats())
    }
}

#[pyclass(frozen)]
pub(crate) struct ReadyBlocks(pub(crate) handoff::ReadyBlocks);

#[pymethods]
impl ReadyBlocks {
    #[new]
    fn new(parts: Vec<(Vec<u8>, u32, Vec<u32>)>) -> PyResult<Self> {
        let part = |(handoff, first, block_ids): (Vec<u8>, _, _)| {
            Ok(handoff::ReadyRange {
                handoff: id(&handoff)?,
                first,
                block_ids,
            })
        };
        let parts = parts.into_iter().map(part).collect::<PyResult<_>>()?;
        handoff::ReadyBlocks::new(parts).map(Self).map_err(to_py)
    }
}

#[pyclass(frozen)]
pub(crate) struct Plan(pub(crate) blocks::Plan);
