//! Transfers at their source, on the message road: blocks of a region as a sequence of bytes, sent as far as the
//! destination's credit goes.

use std::collections::VecDeque;
use std::sync::Arc;

use super::messages::{CREDIT, DATA, READ, REASON_CAP, REFUSED, read_ids, reason};
use super::plan::region_gone;
use super::service::Blocks;
use super::transfer::WINDOW;
use super::transfers::TRANSFERS_IN_FLIGHT;
use crate::codec::{Reader, Writer};
use crate::error::{Error, Result};
use crate::node::{Io, LinkId};
use crate::region::{Layout, RegionId, Run, sequence};
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
        let runs = sequence(layout, ids)?.into();
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
            if !io.message(link, header, payload) {
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

impl Blocks {
    fn serve(
        &mut self,
        io: &mut Io,
        link: LinkId,
        id: u64,
        region: RegionId,
        payload: &[u8],
    ) -> Result<()> {
        let ids = read_ids(payload)?;
        let under_way = self.serving.keys().filter(|(other, _)| *other == link);
        if under_way.count() >= TRANSFERS_IN_FLIGHT {
            return Err(Error::protocol(format_args!(
                "more than {TRANSFERS_IN_FLIGHT} transfers at once"
            )));
        }
        let region = self.regions.get(&region);
        let serving = region
            .ok_or_else(region_gone)
            .and_then(|region| Serving::new(Arc::clone(&region.memory), &region.layout, &ids));
        match serving {
            Ok(serving) => {
                self.serving.insert((link, id), serving);
                self.serve_on(io, link, id);
            }
            Err(error) => {
                let header = io.header(link, REFUSED).u64(id);
                let text = Writer::default().text(&error.to_string(), REASON_CAP);
                io.message(link, header, Payload::Bytes(text.finish()));
            }
        }
        Ok(())
    }

    fn serve_on(&mut self, io: &mut Io, link: LinkId, id: u64) {
        let Some(serving) = self.serving.get_mut(&(link, id)) else {
            return;
        };
        if serving.send(io, link, id) {
            self.serving.remove(&(link, id));
        }
    }

    pub(super) fn transfer_message(
        &mut self,
        io: &mut Io,
        link: LinkId,
        kind: u8,
        mut header: Reader<'_>,
        data: &[u8],
    ) -> Result<()> {
        let id = header.u64()?;
        match kind {
            READ => {
                let region = header.u32()?;
                header.end()?;
                self.serve(io, link, id, region, data)
            }
            DATA => {
                let offset = header.u64()?;
                header.end()?;
                self.placed(io, link, id, offset, data)
            }
            CREDIT => {
                let credit = header.u64()?;
                header.end()?;
                if let Some(serving) = self.serving.get_mut(&(link, id)) {
                    serving.grant(credit);
                }
                self.serve_on(io, link, id);
                Ok(())
            }
            _ => {
                header.end()?;
                self.refused(io, link, id, &reason(data)?);
                Ok(())
            }
        }
    }
}
