//! Messages of peers, at either end of a transfer.

use kvpipe_ucx::AmData;

use super::engine::{Handled, TransferEngine};
use super::message::{Message, Subject};
use super::transfer::{State, Transfer};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::session::ReactorContext;

impl TransferEngine {
    /// A message of a transfer, of a kind that [`Message::is_kind`] knows. What a peer asks for is handed on.
    pub(crate) fn message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        (kind, header): (u8, Reader<'_>),
        data: &AmData,
    ) -> Result<Handled> {
        let message = Message::decode(kind, header, data)?;
        if let Some(transfer) = message.at_destination()
            && !self.was_begun(transfer)
        {
            return Ok(Handled::UnknownTransfer);
        }
        match message {
            Message::Read {
                transfer,
                source,
                wanted,
                ids,
            } => return self.admit_read(session, (transfer, source), wanted, ids),
            Message::Data {
                transfer,
                offset,
                checksum,
            } => {
                let Some(found) = self.transfer(session, transfer) else {
                    return Ok(Handled::Done);
                };
                match &mut found.state {
                    State::Streaming(stream) => {
                        stream.receive(offset, checksum, data)?;
                        stream.send_credit(cx, session);
                    }
                    State::Failed(..) => return Ok(Handled::Done),
                    _ => {
                        let text = format_args!("data of transfer {transfer}, which is no stream");
                        return Err(Error::protocol(text));
                    }
                }
                self.settle(cx, transfer);
            }
            Message::Credit {
                transfer,
                num_bytes,
            } => self.credited(cx, session, transfer, num_bytes),
            Message::Refused { transfer, reason } => {
                if let Some(found) = self.transfer(session, transfer)
                    && found.has_begun()
                {
                    let error = Error::Config(format!("the peer refused: {reason}"));
                    self.fail(cx, transfer, &error);
                }
            }
            Message::Checksums {
                subject: Subject::Transfer(transfer),
                first,
                checksums,
            } => self.checksums(cx, session, transfer, first, &checksums)?,
            Message::Checksums {
                subject: Subject::Source(source),
                first,
                checksums,
            } => self.source_checksums(cx, session, source, first, &checksums)?,
        }
        Ok(Handled::Done)
    }

    /// A transfer from a peer; none when it has ended: what was on its way then is dropped.
    fn transfer(&mut self, session: SessionKey, id: u64) -> Option<&mut Transfer> {
        let transfer = self.transfers.get_mut(&id);
        transfer.filter(|transfer| transfer.request.session == session)
    }

    const fn was_begun(&self, id: u64) -> bool {
        id > 0 && id <= self.last_id
    }

    /// The checksums of the next blocks of a transfer.
    fn checksums(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        id: u64,
        first: u64,
        checksums: &[u64],
    ) -> Result<()> {
        let Some(transfer) = self.transfer(session, id) else {
            return Ok(());
        };
        if transfer.has_failed() {
            return Ok(());
        }
        let num_units = transfer.request.pieces.num_units();
        let num = checksums.len() as u64;
        let verifier = transfer.verifier();
        let verifier =
            verifier.filter(|verifier| first == verifier.num_known() && first + num <= num_units);
        let Some(verifier) = verifier else {
            return Err(Error::protocol(format_args!(
                "{num} checksums from block {first} on of a transfer of {num_units} blocks, which were not to come"
            )));
        };
        verifier.receive(checksums);
        self.settle(cx, id);
        Ok(())
    }

    /// The checksums of the next units of a source, which come unasked. Of one that is not known any more: nothing.
    fn source_checksums(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        source: u64,
        first: u64,
        checksums: &[u64],
    ) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        let Some(known) = peer.sources.get_mut(&source) else {
            return Ok(());
        };
        known.receive(first, checksums)?;
        let queue = peer.queue.iter().take(self.max_in_flight);
        for id in queue.copied().collect::<Vec<_>>() {
            let transfer = self.transfers.get_mut(&id);
            let transfer = transfer.filter(|transfer| transfer.request.source == source);
            if let Some(verifier) = transfer.and_then(Transfer::verifier) {
                verifier.receive(checksums);
                self.settle(cx, id);
            }
        }
        Ok(())
    }
}
