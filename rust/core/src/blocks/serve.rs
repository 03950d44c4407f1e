//! Transfers at their source: blocks of a region as a stream of messages, or the checksums of blocks that the
//! destination reads.

use std::sync::Arc;

use kvpipe_ucx::AmData;

use super::messages::{
    CHECKSUMS, CREDIT, DATA, READ, REASON_CAP, REFUSED, Wanted, read_ids, reason,
};
use super::plan::region_gone;
use super::service::Blocks;
use super::transfers::TRANSFERS_IN_FLIGHT;
use super::verifier::ChecksumJob;
use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};
use crate::reactor::{ReactorContext, SessionKey};
use crate::transfer::region::{RegionId, sequence};
use crate::transfer::stream::Outgoing;
use crate::transport::Payload;

/// What a peer has asked for.
#[derive(Debug)]
pub(super) enum Serving {
    Bytes(Outgoing),
    Checksums(Box<ChecksumJob>),
}

/// Tells a destination that a transfer cannot be served.
pub(super) fn refuse(cx: &mut ReactorContext, session: SessionKey, id: u64, error: &Error) {
    let header = cx.header(session, REFUSED).u64(id);
    let text = Writer::default().text(&error.to_string(), REASON_CAP);
    cx.message(session, header, Payload::Bytes(text.finish()));
}

impl Blocks {
    fn serve(
        &mut self,
        cx: &mut ReactorContext,
        (session, id): (SessionKey, u64),
        region: RegionId,
        wanted: Wanted,
        payload: &[u8],
    ) -> Result<()> {
        let ids = read_ids(payload)?;
        if self.serving.contains_key(&(session, id)) {
            return Err(Error::protocol(format_args!(
                "transfer {id} was asked for twice"
            )));
        }
        let under_way = self.serving.keys().filter(|(other, _)| *other == session);
        if under_way.count() >= TRANSFERS_IN_FLIGHT {
            return Err(Error::protocol(format_args!(
                "more than {TRANSFERS_IN_FLIGHT} transfers at once"
            )));
        }
        match self.serving_of(session, region, wanted, ids) {
            Ok(serving) => {
                if matches!(serving, Serving::Checksums(_)) {
                    self.checksum_jobs.push_back((session, id));
                }
                self.serving.insert((session, id), serving);
                self.serve_on(cx, session, id);
            }
            Err(error) => refuse(cx, session, id, &error),
        }
        Ok(())
    }

    fn serving_of(
        &self,
        session: SessionKey,
        region: RegionId,
        wanted: Wanted,
        ids: Vec<u32>,
    ) -> Result<Serving> {
        let (memory, layout) = self.exposed_to(session, region).ok_or_else(region_gone)?;
        let memory = Arc::clone(memory);
        if wanted == Wanted::Checksums {
            return ChecksumJob::new(memory, layout.clone(), ids)
                .map(|checksum_jobs| Serving::Checksums(Box::new(checksum_jobs)));
        }
        let runs = sequence(layout, &ids)?;
        let is_checksummed = wanted == Wanted::ChecksummedBytes;
        Ok(Serving::Bytes(Outgoing::new(memory, runs, is_checksummed)))
    }

    /// What a peer wants checksums of.
    pub(super) fn checksum_job_of(
        &mut self,
        session: SessionKey,
        id: u64,
    ) -> Option<&mut ChecksumJob> {
        match self.serving.get_mut(&(session, id)) {
            Some(Serving::Checksums(checksum_jobs)) => Some(checksum_jobs),
            _ => None,
        }
    }

    fn stream_of(&mut self, session: SessionKey, id: u64) -> Option<&mut Outgoing> {
        match self.serving.get_mut(&(session, id)) {
            Some(Serving::Bytes(stream)) => Some(stream),
            _ => None,
        }
    }

    fn serve_on(&mut self, cx: &mut ReactorContext, session: SessionKey, id: u64) {
        if let Some(stream) = self.stream_of(session, id)
            && stream.send(cx, session, (DATA, id))
        {
            self.serving.remove(&(session, id));
        }
    }

    pub(super) fn transfer_message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        kind: u8,
        mut header: Reader<'_>,
        data: &AmData,
    ) -> Result<()> {
        let id = header.u64()?;
        match kind {
            READ => {
                let (region, wanted) = (header.u32()?, Wanted::read(&mut header)?);
                header.end()?;
                self.serve(cx, (session, id), region, wanted, data)
            }
            DATA => self.arrived(cx, session, id, header, data),
            CREDIT => {
                let credit = header.u64()?;
                header.end()?;
                if let Some(stream) = self.stream_of(session, id) {
                    stream.grant(credit);
                }
                self.serve_on(cx, session, id);
                Ok(())
            }
            CHECKSUMS => {
                let first = header.u64()?;
                header.end()?;
                self.receive_checksums(session, id, first, data)
            }
            _ => {
                header.end()?;
                self.refused(cx, session, id, &reason(data)?);
                Ok(())
            }
        }
    }
}
