//! `Trace`: the connector's roles write it to the file of `KVPIPE_TRACE`.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use kvpipe_core::trace::{self, Track};
use pyo3::prelude::*;

use crate::agent::id;
use crate::error::{bad, to_py};
use crate::log;

#[pyclass(frozen)]
pub(crate) struct Trace(trace::Trace);

impl Trace {
    pub(crate) fn core(&self) -> trace::Trace {
        self.0.clone()
    }
}

#[pymethods]
impl Trace {
    #[new]
    #[pyo3(signature = (path="", process=""))]
    fn new(py: Python<'_>, path: &str, process: &str) -> PyResult<Self> {
        if path.is_empty() {
            return Ok(Self(trace::Trace::default()));
        }
        log::begin(py)?;
        trace::Trace::to_file(Path::new(path), process)
            .map(Self)
            .map_err(to_py)
    }

    #[getter]
    fn is_on(&self) -> bool {
        self.0.is_on()
    }

    #[pyo3(signature = (name, handoff, **facts))]
    fn instant(
        &self,
        name: &str,
        handoff: &[u8],
        facts: Option<BTreeMap<String, u64>>,
    ) -> PyResult<()> {
        if self.0.is_on() {
            let facts = facts.unwrap_or_default();
            self.0
                .instant(Track::Engine, name, &id(handoff)?, &pairs(&facts));
        }
        Ok(())
    }

    #[pyo3(signature = (name, handoff, began_s, **facts))]
    fn span(
        &self,
        name: &str,
        handoff: &[u8],
        began_s: f64,
        facts: Option<BTreeMap<String, u64>>,
    ) -> PyResult<()> {
        if self.0.is_on() {
            let facts = facts.unwrap_or_default();
            let began = Duration::try_from_secs_f64(began_s)
                .map_err(|_| bad(format!("began_s={began_s}: expected seconds, 0 or more")))?;
            self.0
                .span(Track::Engine, name, &id(handoff)?, began, &pairs(&facts));
        }
        Ok(())
    }
}

fn pairs(facts: &BTreeMap<String, u64>) -> Vec<(&str, u64)> {
    facts
        .iter()
        .map(|(name, value)| (name.as_str(), *value))
        .collect()
}
