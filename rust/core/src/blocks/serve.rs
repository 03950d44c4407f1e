//! A transfer at its source, on the message road: blocks of a region as a sequence of bytes, sent as far as the
//! destination's credit goes.

use std::collections::VecDeque;
use std::sync::Arc;

use super::messages::DATA;
use super::transfer::WINDOW;
use crate::error::Result;
use crate::node::{Io, LinkId};
use crate::region::{Layout, Run, coalesce};
use crate::transport::{Memory, Payload};

/// One message: under UCX's TCP segment (256 KiB), so that it is never reassembled from fragments.
const PIECE: u64 = 128 << 10;

#[derive(Debug)]
pub(super) struct Serving {
    memory: Arc<Memory>,
    runs: VecDeque<Run>,
    sent: u64,
    credit: u64,
}

impl Serving {
    /// Checks the ids that a peer asks for.
    pub(super) fn new(memory: Arc<Memory>, layout: &Layout, ids: &[u32]) -> Result<Self> {
        // The destination of a sequence of bytes: blocks 0, 1, 2, … without gaps.
        let dense = Layout {
            num_blocks: ids.len() as u64,
            block_bytes: layout.block_bytes,
            stride: layout.block_bytes,
        };
        let sequence: Vec<u32> = (0..ids.len() as u32).collect();
        let runs = coalesce((&dense, &sequence), (layout, ids), u64::MAX)?.into();
        Ok(Self {
            memory,
            runs,
            sent: 0,
            credit: WINDOW,
        })
    }

    pub(super) fn grant(&mut self, credit: u64) {
        self.credit = self.credit.saturating_add(credit).min(WINDOW);
    }

    /// Sends what the credit allows; whether everything has been sent.
    pub(super) fn send(&mut self, io: &mut Io, link: LinkId, transfer: u64) -> bool {
        while let Some(run) = self.runs.front_mut() {
            let len = run.len.min(PIECE);
            if self.credit < len {
                return false;
            }
            let header = io.header(link, DATA).u64(transfer).u64(self.sent);
            let memory = Arc::clone(&self.memory);
            let payload = Payload::Memory {
                memory,
                offset: run.from as usize,
                len: len as usize,
            };
            if !io.message(link, header, payload, 0) {
                return false;
            }
            self.sent += len;
            self.credit -= len;
            run.from += len;
            run.len -= len;
            if run.len == 0 {
                self.runs.pop_front();
            }
        }
        true
    }
}
