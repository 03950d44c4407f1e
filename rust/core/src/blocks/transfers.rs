//! Reads of blocks, at their destination and at their source.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::Status;

use super::messages::{BLOCKS_CAP, CREDIT, DATA, READ, REASON_CAP, REFUSED, ids, read_ids, reason};
use super::serve::Serving;
use super::service::Blocks;
use super::transfer::{GET_PIECE, GETS_IN_FLIGHT, Owner, Read, Transfer};
use super::unknown_region;
use crate::codec::{Reader, Writer};
use crate::data::Road;
use crate::error::{Error, Result};
use crate::handoff::HandoffId;
use crate::node::{Io, LinkId};
use crate::region::coalesce;
use crate::transport::Payload;
use crate::work::Completer;

/// Transfers from one peer under way at once; more wait. Bounds the bytes in flight, at the source too.
const TRANSFERS_IN_FLIGHT: usize = 4;

/// What is on its way to a load that has ended has to be here within this time.
const REST_WITHIN: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct ReadCommand {
    pub(super) peer: LinkId,
    pub(super) region: String,
    pub(super) local_ids: Vec<u32>,
    pub(super) remote_region: String,
    pub(super) remote_ids: Vec<u32>,
    pub(super) deadline: Option<Instant>,
    pub(super) completer: Completer<u64>,
}

/// At the destination.
impl Blocks {
    pub(super) fn read_command(&mut self, io: &mut Io, command: ReadCommand) {
        let peer = self.peers.get(&command.peer);
        let Some(regions) = peer.and_then(|peer| peer.regions.as_ref()) else {
            let lost = Error::lost("unknown", "the peer is gone; connect again");
            return command.completer.complete(Err(lost));
        };
        let mut local = self.regions.iter().map(|region| &region.name);
        let mut remote = regions.iter().map(|region| &region.name);
        let Some(local) = local.position(|name| *name == command.region) else {
            return command
                .completer
                .complete(Err(unknown_region(&command.region)));
        };
        let Some(remote) = remote.position(|name| *name == command.remote_region) else {
            return command
                .completer
                .complete(Err(unknown_region(&command.remote_region)));
        };
        let read = Read {
            link: command.peer,
            region: local as u16,
            local_ids: command.local_ids,
            remote_region: remote as u16,
            remote_ids: command.remote_ids,
            deadline: command.deadline,
            owner: Owner::Caller(command.completer),
        };
        self.read(io, read);
    }

    /// Begins a read, or ends it at once with what is wrong with it.
    pub(super) fn read(&mut self, io: &mut Io, read: Read) {
        let link = read.link;
        match self.plan(read) {
            Ok(transfer) => {
                let id = io.token();
                self.deadlines.add(transfer.deadline);
                self.transfers.insert(id, transfer);
                if let Some(peer) = self.peers.get_mut(&link) {
                    peer.transfers.push_back(id);
                }
                self.start_waiting(io, link);
            }
            Err(refused) => {
                let (owner, error) = *refused;
                self.end_owner(io, owner, Err(error));
            }
        }
    }

    fn plan(&self, read: Read) -> std::result::Result<Transfer, Box<(Owner, Error)>> {
        let planned = || {
            let local = self
                .regions
                .get(usize::from(read.region))
                .ok_or_else(|| unknown_region(&read.region.to_string()))?;
            let peer = self.peers.get(&read.link);
            let remote = peer
                .and_then(|peer| peer.regions.as_ref())
                .ok_or_else(|| Error::lost("unknown", "the peer is gone"))?
                .get(usize::from(read.remote_region))
                .ok_or_else(|| unknown_region(&read.remote_region.to_string()))?;
            if read.remote_ids.len() > BLOCKS_CAP {
                let len = read.remote_ids.len();
                return Err(Error::Config(format!(
                    "{len} blocks in one transfer, at most {BLOCKS_CAP} are possible"
                )));
            }
            let to = (&local.layout, &read.local_ids[..]);
            let from = (&remote.layout, &read.remote_ids[..]);
            let runs = coalesce(to, from, GET_PIECE)?;
            Ok((Arc::clone(&local.memory), local.layout.clone(), runs))
        };
        match planned() {
            Ok((memory, layout, runs)) => Ok(Transfer::new(read, memory, layout, runs)),
            Err(error) => Err(Box::new((read.owner, error))),
        }
    }

    /// Starts transfers of a peer as far as the bound on those under way allows.
    fn start_waiting(&mut self, io: &mut Io, link: LinkId) {
        loop {
            let Some(peer) = self.peers.get(&link) else {
                return;
            };
            let is_waiting = |id: &&u64| {
                self.transfers
                    .get(*id)
                    .is_some_and(|transfer| !transfer.is_started)
            };
            let mut first = peer.transfers.iter().take(TRANSFERS_IN_FLIGHT);
            let Some(&id) = first.find(is_waiting) else {
                return;
            };
            self.start(io, link, id);
            self.finish_if_over(io, id);
        }
    }

    fn start(&mut self, io: &mut Io, link: LinkId, id: u64) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        transfer.is_started = true;
        if let Some(Road::Get(_)) = io.road(link) {
            return self.get_on(io, id);
        }
        transfer.is_by_message = true;
        let header = io.header(link, READ).u64(id).u16(transfer.remote_region);
        io.message(link, header, Payload::Bytes(ids(&transfer.remote_ids)), 0);
    }

    /// Get road: keeps reads under way.
    fn get_on(&mut self, io: &mut Io, id: u64) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        let Some(peer) = self.peers.get_mut(&transfer.link) else {
            return;
        };
        let (base, key) = match peer.remote(io, transfer.link, transfer.remote_region) {
            Ok(remote) => remote,
            Err(error) => {
                transfer.failure.get_or_insert(error);
                return;
            }
        };
        while transfer.failure.is_none() && transfer.in_flight < GETS_IN_FLIGHT {
            let Some(&run) = transfer.runs.front() else {
                return;
            };
            let (token, link, memory) = (io.token(), transfer.link, &transfer.memory);
            let (at, len) = (run.to as usize, run.len as usize);
            if !io.get(link, memory, at, len, base + run.from, &key, token) {
                return;
            }
            transfer.runs.pop_front();
            transfer.in_flight += 1;
            self.gets.insert(token, (id, run.len));
        }
    }

    /// A get has ended.
    pub(super) fn got(&mut self, io: &mut Io, token: u64, result: std::result::Result<(), Status>) {
        let Some((id, len)) = self.gets.remove(&token) else {
            return;
        };
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        transfer.in_flight -= 1;
        let link = transfer.link;
        match result {
            Ok(()) => transfer.num_placed += len,
            Err(status) => {
                let error = Error::lost(&io.peer(link), status);
                transfer.failure.get_or_insert(error.clone());
                io.fail(link, error);
            }
        }
        self.get_on(io, id);
        self.settle(io, link, id);
    }

    /// Ends a transfer if nothing more will happen to it, and lets the next begin.
    fn settle(&mut self, io: &mut Io, link: LinkId, id: u64) {
        if self.finish_if_over(io, id) {
            self.start_waiting(io, link);
        }
    }

    fn finish_if_over(&mut self, io: &mut Io, id: u64) -> bool {
        if !self.transfers.get(&id).is_some_and(Transfer::is_over) {
            return false;
        }
        let Some(transfer) = self.transfers.remove(&id) else {
            return false;
        };
        if let Some(peer) = self.peers.get_mut(&transfer.link)
            && let Some(at) = peer.transfers.iter().position(|other| *other == id)
        {
            peer.transfers.remove(at);
        }
        let Transfer {
            memory,
            layout,
            num_total,
            failure,
            owner,
            ..
        } = transfer;
        let outcome = match failure {
            Some(error) => Err(error),
            None => Ok((num_total, memory, layout)),
        };
        self.end_owner(io, owner, outcome);
        true
    }

    pub(super) fn end_owner(
        &mut self,
        io: &mut Io,
        owner: Owner,
        outcome: Result<(u64, Arc<crate::transport::Memory>, crate::region::Layout)>,
    ) {
        match owner {
            Owner::Caller(completer) => completer.complete(outcome.map(|(bytes, ..)| bytes)),
            Owner::Handoff(handoff, batch) => {
                match outcome {
                    Ok((bytes, memory, layout)) => {
                        let whole = self.verify(&handoff, &batch, &memory, &layout);
                        self.consumer.read(&handoff, &batch, &whole, bytes);
                    }
                    Err(error) => self.consumer.read_failed(&handoff, &error.to_string()),
                }
                self.end_load_if_over(io, handoff);
            }
        }
    }

    fn placed(
        &mut self,
        io: &mut Io,
        link: LinkId,
        id: u64,
        offset: u64,
        data: &[u8],
    ) -> Result<()> {
        // Of a transfer that has ended meanwhile: dropped, its memory is not ours to write any more.
        let is_open = |transfer: &&mut Transfer| {
            transfer.link == link && transfer.is_by_message && transfer.failure.is_none()
        };
        let Some(transfer) = self.transfers.get_mut(&id).filter(is_open) else {
            return Ok(());
        };
        transfer.place(offset, data)?;
        if let Some(credit) = transfer.take_credit() {
            let header = io.header(link, CREDIT).u64(id).u64(credit);
            io.message(link, header, Payload::None, 0);
        }
        self.settle(io, link, id);
        Ok(())
    }

    fn refused(&mut self, io: &mut Io, link: LinkId, id: u64, text: &str) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        if transfer.link != link || !transfer.is_by_message {
            return;
        }
        let error = Error::Config(format!("the peer refused: {text}"));
        transfer.failure.get_or_insert(error);
        self.settle(io, link, id);
    }

    /// Ends what a load need not wait for: reads that have not begun, and gets that are not posted.
    pub(super) fn abandon_reads(&mut self, io: &mut Io, handoff: &HandoffId, reason: &str) {
        let is_theirs =
            |owner: &Owner| matches!(owner, Owner::Handoff(other, _) if other == handoff);
        let mut affected = Vec::new();
        for (id, transfer) in &mut self.transfers {
            if !is_theirs(&transfer.owner) {
                continue;
            }
            if transfer.is_by_message {
                // A source cannot be stopped once it sends; one that does not send is not waited for.
                transfer.deadline.get_or_insert(io.now + REST_WITHIN);
                self.deadlines.add(transfer.deadline);
            } else {
                let error = Error::Closed(reason.to_owned());
                transfer.failure.get_or_insert(error);
                affected.push((transfer.link, *id));
            }
        }
        for (link, id) in affected {
            self.settle(io, link, id);
        }
    }

    pub(super) fn transfers_down(&mut self, io: &mut Io, link: LinkId, error: &Error) {
        let mut affected = Vec::new();
        for (id, transfer) in &mut self.transfers {
            if transfer.link == link {
                transfer.failure.get_or_insert(error.clone());
                affected.push(*id);
            }
        }
        for id in affected {
            self.finish_if_over(io, id);
        }
    }

    pub(super) fn expire_transfers(&mut self, io: &mut Io) {
        let now = io.now;
        if !self.deadlines.take_if_past(now) {
            return;
        }
        let pending = |transfer: &&mut Transfer| transfer.failure.is_none();
        for transfer in self.transfers.values_mut().filter(pending) {
            if transfer.deadline.is_some_and(|deadline| deadline <= now) {
                let text = "the blocks were not read in time; the peer is closed, connect again";
                transfer.failure = Some(Error::Timeout(text.to_owned()));
                io.fail(transfer.link, Error::Timeout(text.to_owned()));
            } else {
                self.deadlines.add(transfer.deadline);
            }
        }
    }
}

/// At the source, on the message road.
impl Blocks {
    fn serve(
        &mut self,
        io: &mut Io,
        link: LinkId,
        id: u64,
        region: u16,
        payload: &[u8],
    ) -> Result<()> {
        let ids = read_ids(payload)?;
        let under_way = self.serving.keys().filter(|(other, _)| *other == link);
        if under_way.count() >= TRANSFERS_IN_FLIGHT {
            return Err(Error::protocol(format_args!(
                "more than {TRANSFERS_IN_FLIGHT} transfers at once"
            )));
        }
        let region = self
            .regions
            .get(usize::from(region))
            .ok_or_else(|| unknown_region(&region.to_string()));
        let serving = region
            .and_then(|region| Serving::new(Arc::clone(&region.memory), &region.layout, &ids));
        match serving {
            Ok(serving) => {
                self.serving.insert((link, id), serving);
                self.serve_on(io, link, id);
            }
            Err(error) => {
                let header = io.header(link, REFUSED).u64(id);
                let text = Writer::default().text(&error.to_string(), REASON_CAP);
                io.message(link, header, Payload::Bytes(text.finish()), 0);
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
                let region = header.u16()?;
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
