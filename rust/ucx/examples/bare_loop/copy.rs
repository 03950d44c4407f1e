//! Blocks copied by one thread within one process: the speed of the memory.

use std::time::Instant;

use crate::Result;
use crate::request::{Case, Request, pattern};

/// Source and target of the copies.
pub(crate) struct CopyBuffers {
    source: Vec<u8>,
    target: std::cell::RefCell<Vec<u8>>,
}

impl CopyBuffers {
    pub(crate) fn new(total: usize) -> Self {
        Self {
            source: pattern(total),
            target: vec![1; total].into(),
        }
    }

    /// Answers one request.
    pub(crate) fn answer(&self, request: &Request) -> Result<String> {
        if request.verb == "meet" {
            return Ok("ok".to_owned());
        }
        let case = Case::of(request)?;
        let total = self.source.len();
        let (local, remote) = (case.transfers(total, 1), case.transfers(total, 2));
        let pairs = || local.iter().flatten().zip(remote.iter().flatten());
        let mut target = self.target.borrow_mut();
        let started = Instant::now();
        match request.verb.as_str() {
            "run" => {
                for (to, from) in pairs() {
                    let block = &self.source[*from..*from + case.bytes];
                    target[*to..*to + case.bytes].copy_from_slice(block);
                }
                Ok(format!("ok seconds={}", started.elapsed().as_secs_f64()))
            }
            "clear" => {
                target.fill(0);
                Ok("ok".to_owned())
            }
            _ => {
                let is_equal = |(to, from): (&usize, &usize)| {
                    target[*to..*to + case.bytes] == self.source[*from..*from + case.bytes]
                };
                let differs = || "the copy differs from its source".into();
                pairs()
                    .all(is_equal)
                    .then(|| "ok".to_owned())
                    .ok_or_else(differs)
            }
        }
    }
}
