//! Messages of handoffs between two agents; see docs/reference/wire-agent.md.

use std::time::Duration;

use super::ReadyBlock;
use crate::blocks::messages::REGIONS_CAP;
use crate::blocks::reason;
use crate::error::{Error, Result};
use crate::ids::{Epoch, HandoffId, RegionId, SessionKey};
use crate::net::codec::{Reader, Writer, micros};
use crate::session::Links;
use crate::transfer::message::{BLOCKS_CAP, REASON_CAP};

const SELECT: u8 = 48;
const BLOCKS_READY: u8 = 49;
const HANDOFF_ENDED: u8 = 50;
const ACK: u8 = 51;
const VALIDATE: u8 = 52;
const VALID: u8 = 53;
const INVALID: u8 = 54;

/// The blocks at some positions, in the regions that share them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SelectedPart {
    /// The first position.
    pub(crate) first: u32,
    /// The position after the last.
    pub(crate) end: u32,
    /// The producer's regions.
    pub(crate) regions: Vec<RegionId>,
}

/// Message of one side of a handoff to the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HandoffMessage {
    /// Consumer: I want these blocks, and wait for the first one until this time is over.
    Select {
        parts: Vec<SelectedPart>,
        first_block_timeout: Duration,
    },
    /// Producer: these blocks can be read.
    BlocksReady {
        epoch: Epoch,
        blocks: Vec<ReadyBlock>,
    },
    /// Producer: nothing more will come.
    Ended { reason: String },
    /// Consumer: everything is here.
    Ack,
    /// Consumer: my reads of blocks of this epoch have ended. Does the grant still hold? The answer repeats the question's
    /// number.
    Validate { epoch: Epoch, question: u64 },
    /// Producer: it does.
    Valid { question: u64 },
    /// Producer: it does not.
    Invalid { question: u64 },
}

impl HandoffMessage {
    fn kind(&self) -> u8 {
        match self {
            Self::Select { .. } => SELECT,
            Self::BlocksReady { .. } => BLOCKS_READY,
            Self::Ended { .. } => HANDOFF_ENDED,
            Self::Ack => ACK,
            Self::Validate { .. } => VALIDATE,
            Self::Valid { .. } => VALID,
            Self::Invalid { .. } => INVALID,
        }
    }

    /// True if messages of this kind are of handoffs.
    pub(super) fn is_kind(kind: u8) -> bool {
        (SELECT..=INVALID).contains(&kind)
    }

    fn encode(&self, header: Writer, handoff: &HandoffId) -> (Writer, Vec<u8>) {
        let header = header.raw(handoff);
        match self {
            Self::Select {
                parts,
                first_block_timeout,
            } => {
                let list = Writer::default().list(parts, write_part);
                (header.u64(micros(*first_block_timeout)), list.finish())
            }
            Self::BlocksReady { epoch, blocks } => {
                let list = Writer::default().list(blocks, write_block);
                (header.u64(*epoch), list.finish())
            }
            Self::Ended { reason } => {
                let text = Writer::default().text(reason, REASON_CAP);
                (header, text.finish())
            }
            Self::Ack => (header, Vec::new()),
            Self::Validate { epoch, question } => (header.u64(*epoch).u64(*question), Vec::new()),
            Self::Valid { question } | Self::Invalid { question } => {
                (header.u64(*question), Vec::new())
            }
        }
    }

    /// Reads a header after its kind, and the payload.
    pub(crate) fn decode(
        kind: u8,
        mut header: Reader<'_>,
        payload: &[u8],
    ) -> Result<(HandoffId, Self)> {
        let handoff = header.fixed()?;
        let message = match kind {
            SELECT => {
                let first_block_timeout = Duration::from_micros(header.u64()?);
                let mut payload = Reader::new(payload);
                let parts = payload.list(REGIONS_CAP, read_part)?;
                payload.end()?;
                check_regions(&parts)?;
                Self::Select {
                    parts,
                    first_block_timeout,
                }
            }
            BLOCKS_READY => {
                let epoch = header.u64()?;
                let mut payload = Reader::new(payload);
                let blocks = payload.list(BLOCKS_CAP, read_block)?;
                payload.end()?;
                Self::BlocksReady { epoch, blocks }
            }
            HANDOFF_ENDED => Self::Ended {
                reason: reason(payload)?,
            },
            ACK => Self::Ack,
            VALIDATE => Self::Validate {
                epoch: header.u64()?,
                question: header.u64()?,
            },
            VALID => Self::Valid {
                question: header.u64()?,
            },
            INVALID => Self::Invalid {
                question: header.u64()?,
            },
            other => return Err(Error::protocol(format_args!("message {other}"))),
        };
        header.end()?;
        Ok((handoff, message))
    }

    pub(super) fn send(&self, links: &mut Links, session: SessionKey, handoff: &HandoffId) {
        let (header, payload) = self.encode(Links::header(self.kind()), handoff);
        links.message(session, header, &payload);
    }
}

fn write_part(writer: Writer, part: &SelectedPart) -> Writer {
    let writer = writer.u32(part.first).u32(part.end);
    writer.list(&part.regions, |writer, region| writer.u32(*region))
}

fn read_part(reader: &mut Reader<'_>) -> Result<SelectedPart> {
    Ok(SelectedPart {
        first: reader.u32()?,
        end: reader.u32()?,
        regions: reader.list(REGIONS_CAP, Reader::u32)?,
    })
}

/// A selection is remembered until its blocks are ready.
fn check_regions(parts: &[SelectedPart]) -> Result<()> {
    let num_regions: usize = parts.iter().map(|part| part.regions.len()).sum();
    if num_regions > REGIONS_CAP {
        let text =
            format_args!("{num_regions} selected regions, at most {REGIONS_CAP} are allowed");
        return Err(Error::protocol(text));
    }
    Ok(())
}

fn write_block(writer: Writer, block: &ReadyBlock) -> Writer {
    let writer = writer.u32(block.region).u32(block.position);
    let writer = writer.u32(block.block_id);
    match block.checksum {
        Some(checksum) => writer.u8(1).u64(checksum),
        None => writer.u8(0),
    }
}

fn read_block(reader: &mut Reader<'_>) -> Result<ReadyBlock> {
    Ok(ReadyBlock {
        region: reader.u32()?,
        position: reader.u32()?,
        block_id: reader.u32()?,
        checksum: reader.flag()?.then(|| reader.u64()).transpose()?,
    })
}

#[cfg(any(test, feature = "fuzzing"))]
impl HandoffMessage {
    /// Kind and header, then the payload.
    pub(crate) fn to_bytes(&self, handoff: &HandoffId) -> (Vec<u8>, Vec<u8>) {
        let (header, payload) = self.encode(Writer::new(self.kind()), handoff);
        (header.finish(), payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read_back(message: &HandoffMessage) {
        let (header, payload) = message.to_bytes(&[7; 16]);
        let read = |header: &[u8], payload: &[u8]| {
            HandoffMessage::decode(header[0], Reader::new(&header[1..]), payload)
        };
        assert_eq!(read(&header, &payload), Ok(([7; 16], message.clone())));
        assert!(read(&header[..header.len() - 1], &payload).is_err());
        assert!(read(&[&header[..], &[0]].concat(), &payload).is_err());
        if !payload.is_empty() {
            assert!(read(&header, &payload[..payload.len() - 1]).is_err());
        }
    }

    #[test]
    fn a_selection_of_more_regions_than_an_agent_has_is_refused() {
        let part = SelectedPart {
            first: 0,
            end: 1,
            regions: vec![7; REGIONS_CAP],
        };
        let select = |parts: &[SelectedPart]| HandoffMessage::Select {
            parts: parts.to_vec(),
            first_block_timeout: Duration::MAX,
        };
        let (header, payload) = select(std::slice::from_ref(&part)).to_bytes(&[7; 16]);
        assert!(HandoffMessage::decode(header[0], Reader::new(&header[1..]), &payload).is_ok());
        let (header, payload) = select(&[part.clone(), part]).to_bytes(&[7; 16]);
        let read = HandoffMessage::decode(header[0], Reader::new(&header[1..]), &payload);
        assert!(read.is_err());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(numbers: Vec<(u32, u32, u32, Option<u64>)>, reason: String, epoch: u64) {
            let blocks = numbers
                .iter()
                .map(|&(region, position, block_id, checksum)| ReadyBlock { region, position, block_id, checksum })
                .collect();
            let part = |&(first, end, region, _): &(u32, u32, u32, _)| SelectedPart { first, end, regions: vec![region, 7] };
            let first_block_timeout = Duration::from_micros(epoch);
            read_back(&HandoffMessage::Select { parts: numbers.iter().map(part).collect(), first_block_timeout });
            read_back(&HandoffMessage::BlocksReady { epoch, blocks });
            read_back(&HandoffMessage::Ended { reason });
            read_back(&HandoffMessage::Ack);
            read_back(&HandoffMessage::Validate { epoch, question: 7 });
            read_back(&HandoffMessage::Valid { question: epoch });
            read_back(&HandoffMessage::Invalid { question: epoch });
        }

        #[test]
        fn any_bytes_give_a_message_or_an_error(kind: u8, header: Vec<u8>, payload: Vec<u8>) {
            let read = HandoffMessage::decode(kind, Reader::new(&header), &payload);
            prop_assert!(read.is_err() || HandoffMessage::is_kind(kind));
        }
    }
}
