//! Messages of an agent besides those of transfers; see docs/reference/wire-agent.md.

use std::borrow::Cow;

use super::notices::TAG_CAP;
use crate::error::{Error, Result};
use crate::ids::{RegionId, SessionKey};
use crate::net::codec::{Reader, Writer};
use crate::session::Links;
use crate::transfer::message::{BLOCKS_CAP, REASON_CAP};
use crate::transfer::region::RemoteRegion;

pub(crate) const OFFER: u8 = 36;
const ACCEPTED: u8 = 37;
const DECLINED: u8 = 38;
const CORRUPT: u8 = 39;
const NOTIFY: u8 = 40;
const VOID: u8 = 41;
const NOTED: u8 = 42;
const WITHDRAW: u8 = 47;

/// The regions of the sender, all of them, in the order of their ids.
///
/// A region that was in the message before and is not any more has been closed.
pub(super) const REGIONS: u8 = 1;
/// The sender reads no more of this region, which the receiver has closed.
pub(super) const RELEASED: u8 = 2;
/// The sender loads slices of the receiver's blocks: they are to be divided into so many.
pub(super) const DIVIDE: u8 = 3;
/// The answer to [`DIVIDE`], after REGIONS: so many, and why not, or nothing.
pub(super) const DIVIDED: u8 = 4;
/// Most regions of an agent.
pub(in crate::blocks) const REGIONS_CAP: usize = 4096;

pub(crate) fn write_regions(regions: &[RemoteRegion]) -> Vec<u8> {
    Writer::new(REGIONS)
        .list(regions, |writer, region| region.write(writer))
        .finish()
}

pub(super) fn write_divide(count: u32) -> Vec<u8> {
    Writer::new(DIVIDE).u32(count).finish()
}

pub(super) fn write_divided(count: u32, reason: &str) -> Vec<u8> {
    let writer = Writer::new(DIVIDED).u32(count);
    writer.text(reason, REASON_CAP).finish()
}

/// Reads what follows the type of [`DIVIDED`]: the number of slices, and why there are none, or nothing.
pub(super) fn read_divided(mut reader: Reader<'_>) -> Result<(u32, String)> {
    let divided = (reader.u32()?, reader.str(REASON_CAP)?);
    reader.end()?;
    Ok(divided)
}

/// Reads what follows the type of [`REGIONS`].
pub(crate) fn read_regions(mut reader: Reader<'_>) -> Result<Vec<RemoteRegion>> {
    let regions = reader.list(REGIONS_CAP, RemoteRegion::read)?;
    reader.end()?;
    if !regions.is_sorted_by(|a, b| a.id < b.id) {
        return Err(Error::protocol("regions out of order"));
    }
    Ok(regions)
}

/// Blocks that a writer offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Offer<'a> {
    pub(crate) id: u64,
    /// The region of the target.
    pub(crate) to: RegionId,
    /// The region of the writer.
    pub(crate) from: RegionId,
    pub(crate) to_ids: Cow<'a, [u32]>,
    pub(crate) from_ids: Cow<'a, [u32]>,
    pub(crate) is_checksummed: bool,
    /// The number and the tag of its notification.
    pub(crate) notification: Option<(u64, Cow<'a, [u8]>)>,
}

/// Message of one agent to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AgentMessage<'a> {
    /// Writer: read these blocks.
    Offer(Offer<'a>),
    /// Writer: do not read the blocks of the offer any more. Its answer follows when nothing reads them.
    Withdraw { offer: u64 },
    /// Target: the blocks of the offer are here.
    Accepted { offer: u64 },
    /// Target: the blocks of the offer were not read. The number of its notification is void.
    Declined { offer: u64, reason: String },
    /// Target: the blocks of the offer differ from their checksums. The number of its notification is void.
    Corrupt { offer: u64, reason: String },
    /// Sender: a notification.
    Notify { number: u64, tag: Vec<u8> },
    /// Sender: the transfer of the notification with this number has failed.
    Void { number: u64 },
    /// Receiver: all notifications before `received` have come, and its user has drained those before `drained`.
    Noted { received: u64, drained: u64 },
}

impl AgentMessage<'_> {
    fn kind(&self) -> u8 {
        match self {
            Self::Offer(_) => OFFER,
            Self::Withdraw { .. } => WITHDRAW,
            Self::Accepted { .. } => ACCEPTED,
            Self::Declined { .. } => DECLINED,
            Self::Corrupt { .. } => CORRUPT,
            Self::Notify { .. } => NOTIFY,
            Self::Void { .. } => VOID,
            Self::Noted { .. } => NOTED,
        }
    }

    /// Continues a header after its kind, and makes the payload.
    pub(crate) fn encode(self, header: Writer) -> (Writer, Vec<u8>) {
        match self {
            Self::Offer(offer) => {
                let header = header.u64(offer.id).u32(offer.to).u32(offer.from);
                let header = header.u8(offer.is_checksummed.into());
                let (header, tag) = match &offer.notification {
                    Some((number, tag)) => (header.u8(1).u64(*number), &tag[..]),
                    None => (header.u8(0), &[][..]),
                };
                let payload = Writer::default()
                    .list(&offer.to_ids, |w, id| w.u32(*id))
                    .list(&offer.from_ids, |w, id| w.u32(*id))
                    .bytes(tag);
                (header, payload.finish())
            }
            Self::Withdraw { offer } | Self::Accepted { offer } => (header.u64(offer), Vec::new()),
            Self::Declined { offer, reason } | Self::Corrupt { offer, reason } => {
                let text = Writer::default().text(&reason, REASON_CAP);
                (header.u64(offer), text.finish())
            }
            Self::Notify { number, tag } => (header.u64(number), tag),
            Self::Void { number } => (header.u64(number), Vec::new()),
            Self::Noted { received, drained } => (header.u64(received).u64(drained), Vec::new()),
        }
    }

    /// Reads a header after its kind, and the payload.
    pub(crate) fn decode(
        kind: u8,
        mut header: Reader<'_>,
        payload: &[u8],
    ) -> Result<AgentMessage<'static>> {
        let id = header.u64()?;
        let message = match kind {
            OFFER => AgentMessage::Offer(read_offer(id, &mut header, payload)?),
            WITHDRAW => AgentMessage::Withdraw { offer: id },
            ACCEPTED => AgentMessage::Accepted { offer: id },
            DECLINED => AgentMessage::Declined {
                offer: id,
                reason: reason(payload)?,
            },
            CORRUPT => AgentMessage::Corrupt {
                offer: id,
                reason: reason(payload)?,
            },
            NOTIFY => AgentMessage::Notify {
                number: id,
                tag: payload.to_vec(),
            },
            VOID => AgentMessage::Void { number: id },
            NOTED => AgentMessage::Noted {
                received: id,
                drained: header.u64()?,
            },
            other => return Err(Error::protocol(format_args!("message {other} to an agent"))),
        };
        header.end()?;
        Ok(message)
    }

    pub(super) fn send(self, links: &mut Links, session: SessionKey) {
        let header = Links::header(self.kind());
        let (header, payload) = self.encode(header);
        links.message(session, header, &payload);
    }
}

fn read_offer(id: u64, header: &mut Reader<'_>, payload: &[u8]) -> Result<Offer<'static>> {
    let (to, from) = (header.u32()?, header.u32()?);
    let is_checksummed = header.flag()?;
    let number = header.flag()?.then(|| header.u64()).transpose()?;
    let mut reader = Reader::new(payload);
    let to_ids = reader.list(BLOCKS_CAP, Reader::u32)?.into();
    let from_ids = reader.list(BLOCKS_CAP, Reader::u32)?.into();
    let tag = reader.bytes(TAG_CAP)?.to_vec();
    reader.end()?;
    if number.is_none() && !tag.is_empty() {
        return Err(Error::protocol("an offer with a tag that has no number"));
    }
    Ok(Offer {
        id,
        to,
        from,
        to_ids,
        from_ids,
        is_checksummed,
        notification: number.map(|number| (number, tag.into())),
    })
}

pub(crate) fn reason(payload: &[u8]) -> Result<String> {
    let mut reader = Reader::new(payload);
    let reason = reader.str(REASON_CAP)?;
    reader.end()?;
    Ok(reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn to_bytes(message: AgentMessage<'_>) -> (Vec<u8>, Vec<u8>) {
        let (header, payload) = message.encode(Writer::default());
        (header.finish(), payload)
    }

    fn read_back(message: &AgentMessage<'_>) {
        let (header, payload) = to_bytes(message.clone());
        let read =
            |header: &[u8]| AgentMessage::decode(message.kind(), Reader::new(header), &payload);
        assert_eq!(read(&header).as_ref(), Ok(message));
        assert!(read(&header[..header.len() - 1]).is_err());
        assert!(read(&[&header[..], &[0]].concat()).is_err());
    }

    proptest! {
        #[test]
        fn any_payload_gives_a_value_or_an_error(kind: u8, payload: Vec<u8>) {
            let _ = reason(&payload);
            let _ = AgentMessage::decode(kind, Reader::new(&payload), &payload);
            let _ = AgentMessage::decode(OFFER, Reader::new(&payload), &payload);
            let _ = read_regions(Reader::new(&payload));
        }

        #[test]
        fn what_is_written_is_read_back(
            ids: Vec<(u32, u32)>,
            is_checksummed: bool,
            notification: Option<(u64, Vec<u8>)>,
            number: u64,
            reason: String,
        ) {
            let (to_ids, from_ids): (Vec<u32>, Vec<u32>) = ids.into_iter().unzip();
            let notification = notification.map(|(number, tag)| (number, tag.into()));
            let (to_ids, from_ids) = (to_ids.into(), from_ids.into());
            read_back(&AgentMessage::Offer(Offer { id: 1, to: 2, from: 3, to_ids, from_ids, is_checksummed, notification }));
            read_back(&AgentMessage::Withdraw { offer: number });
            read_back(&AgentMessage::Accepted { offer: number });
            read_back(&AgentMessage::Declined { offer: number, reason: reason.clone() });
            read_back(&AgentMessage::Corrupt { offer: number, reason });
            read_back(&AgentMessage::Notify { number, tag: vec![7; 3] });
            read_back(&AgentMessage::Void { number });
            read_back(&AgentMessage::Noted { received: number, drained: 1 });
        }

        #[test]
        fn a_tag_without_a_number_is_an_error(tag: u8) {
            let header = Writer::default().u64(1).u32(2).u32(3).u8(1).u8(0).finish();
            let payload = Writer::default().u32(0).u32(0).bytes(&[tag]).finish();
            prop_assert!(AgentMessage::decode(OFFER, Reader::new(&header), &payload).is_err());
        }
    }
}
