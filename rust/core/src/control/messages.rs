//! Frames of the control plane; see docs/reference/wire-control.md.

use std::time::Duration;

use super::{ControlQuery, ControlReply, HandoffUpdate, Moment, Opening, Rank, SequenceState};
use crate::error::{Error, Result};
use crate::ids::HandoffId;
use crate::net::codec::{Reader, Writer, micros};

/// Longest text: a reason or an address.
const TEXT_CAP: usize = 4096;
/// Largest JSON document in a reply.
const JSON_CAP: usize = 1 << 20;
/// Most workers of a producer.
const RANKS_CAP: usize = 4096;
/// Most stages of a producer's pipeline, and most KV cache groups of its model.
const STAGES_CAP: usize = 256;
const GROUPS_CAP: usize = 1024;
/// Most token ids that prefill samples.
const OUTPUT_IDS_CAP: usize = 4096;

/// A frame between two control ports, or between the proxy and one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ControlMessage {
    Watch(HandoffId),
    Unwatch {
        handoff: HandoffId,
        is_acknowledged: bool,
    },
    Update {
        handoff: HandoffId,
        update: HandoffUpdate,
    },
    Query {
        id: u64,
        query: ControlQuery,
    },
    Reply {
        id: u64,
        reply: ControlReply,
    },
}

const WATCH: u8 = 1;
const UNWATCH: u8 = 2;
const OPENED: u8 = 3;
const FINISHED: u8 = 4;
const ENDED: u8 = 5;
const DESCRIBE: u8 = 6;
const RELEASE: u8 = 7;
const RESULT: u8 = 8;
const REPLY: u8 = 9;
const SUBSCRIBE: u8 = 10;
const WATCHED: u8 = 11;
const PROGRESS: u8 = 12;
const CHECK: u8 = 13;

// Kinds of replies.
const DESCRIPTION: u8 = 0;
const RESULT_KNOWN: u8 = 1;
const RESULT_UNKNOWN: u8 = 2;
const KNOWN: u8 = 3;
const DUE: u8 = 4;
const FINISHED_AS_PREDICTED: u8 = 5;
const FINISHED_UNPREDICTED: u8 = 6;
const CONSUMER_WATCHES: u8 = 7;
const HANDOFF_ENDED: u8 = 8;
const CHECKED: u8 = 9;

impl ControlMessage {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Watch(handoff) => Writer::new(WATCH).raw(handoff),
            Self::Unwatch {
                handoff,
                is_acknowledged,
            } => Writer::new(UNWATCH)
                .raw(handoff)
                .u8(u8::from(*is_acknowledged)),
            Self::Update { handoff, update } => match update {
                HandoffUpdate::Opened(opening) => Writer::new(OPENED)
                    .raw(handoff)
                    .raw(&opening.prompt_hash)
                    .u32(opening.num_tokens)
                    .list(&opening.ranks, |w, rank| {
                        w.str(&rank.address).raw(&rank.incarnation)
                    })
                    .list(&opening.stages, |w, stage| {
                        w.list(stage, |w, num_layers| w.u32(*num_layers))
                    })
                    .text(&opening.adapter, TEXT_CAP),
                HandoffUpdate::Finished(state) => Writer::new(FINISHED)
                    .raw(handoff)
                    .list(&state.output_ids, |w, id| w.u32(*id))
                    .str(&state.finish_reason)
                    .u32(state.num_cached_tokens)
                    .raw(&state.sampling_hash),
                HandoffUpdate::Ended(reason) => {
                    Writer::new(ENDED).raw(handoff).text(reason, TEXT_CAP)
                }
            },
            Self::Query { id, query } => match query {
                ControlQuery::Describe => Writer::new(DESCRIBE).u64(*id),
                ControlQuery::Release(handoff) => Writer::new(RELEASE).u64(*id).raw(handoff),
                ControlQuery::Result(handoff) => Writer::new(RESULT).u64(*id).raw(handoff),
                ControlQuery::Subscribe { handoff, lead } => Writer::new(SUBSCRIBE)
                    .u64(*id)
                    .raw(handoff)
                    .u64(micros(*lead)),
                ControlQuery::Progress { handoff, remaining } => Writer::new(PROGRESS)
                    .u64(*id)
                    .raw(handoff)
                    .u64(micros(*remaining)),
                ControlQuery::Watched(handoff) => Writer::new(WATCHED).u64(*id).raw(handoff),
                ControlQuery::Check(producer) => {
                    Writer::new(CHECK).u64(*id).text(producer, TEXT_CAP)
                }
            },
            Self::Reply { id, reply } => write_reply(Writer::new(REPLY).u64(*id), reply),
        }
        .finish()
    }

    pub(crate) fn decode(frame: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(frame);
        let message = match reader.u8()? {
            WATCH => Self::Watch(reader.fixed()?),
            UNWATCH => Self::Unwatch {
                handoff: reader.fixed()?,
                is_acknowledged: reader.flag()?,
            },
            kind @ (OPENED | FINISHED | ENDED) => Self::Update {
                handoff: reader.fixed()?,
                update: update(kind, &mut reader)?,
            },
            kind @ (DESCRIBE | RELEASE | RESULT | SUBSCRIBE | PROGRESS | WATCHED | CHECK) => {
                Self::Query {
                    id: reader.u64()?,
                    query: query(kind, &mut reader)?,
                }
            }
            REPLY => Self::Reply {
                id: reader.u64()?,
                reply: read_reply(&mut reader)?,
            },
            other => {
                return Err(Error::protocol(format_args!(
                    "frame {other} on the control plane"
                )));
            }
        };
        reader.end()?;
        Ok(message)
    }
}

fn write_reply(writer: Writer, reply: &ControlReply) -> Writer {
    match reply {
        ControlReply::Description(json) => writer.u8(DESCRIPTION).str(json),
        ControlReply::Result(Some(json)) => writer.u8(RESULT_KNOWN).str(json),
        ControlReply::Result(None) => writer.u8(RESULT_UNKNOWN),
        ControlReply::Known(is_known) => writer.u8(KNOWN).u8((*is_known).into()),
        ControlReply::Moment(moment) => match moment {
            Moment::Due(remaining) => writer.u8(DUE).u64(micros(*remaining)),
            Moment::Finished(Some(remaining)) => {
                writer.u8(FINISHED_AS_PREDICTED).u64(micros(*remaining))
            }
            Moment::Finished(None) => writer.u8(FINISHED_UNPREDICTED),
            Moment::Watched => writer.u8(CONSUMER_WATCHES),
            Moment::Ended(reason) => writer.u8(HANDOFF_ENDED).text(reason, TEXT_CAP),
        },
        ControlReply::Checked(reason) => writer.u8(CHECKED).text(reason, TEXT_CAP),
    }
}

fn read_reply(reader: &mut Reader<'_>) -> Result<ControlReply> {
    Ok(match reader.u8()? {
        DESCRIPTION => ControlReply::Description(reader.str(JSON_CAP)?),
        RESULT_KNOWN => ControlReply::Result(Some(reader.str(JSON_CAP)?)),
        RESULT_UNKNOWN => ControlReply::Result(None),
        KNOWN => ControlReply::Known(reader.flag()?),
        DUE => ControlReply::Moment(Moment::Due(Duration::from_micros(reader.u64()?))),
        FINISHED_AS_PREDICTED => {
            let remaining = Duration::from_micros(reader.u64()?);
            ControlReply::Moment(Moment::Finished(Some(remaining)))
        }
        FINISHED_UNPREDICTED => ControlReply::Moment(Moment::Finished(None)),
        CONSUMER_WATCHES => ControlReply::Moment(Moment::Watched),
        HANDOFF_ENDED => ControlReply::Moment(Moment::Ended(reader.str(TEXT_CAP)?)),
        CHECKED => ControlReply::Checked(reader.str(TEXT_CAP)?),
        other => return Err(Error::protocol(format_args!("reply {other}"))),
    })
}

fn query(kind: u8, reader: &mut Reader<'_>) -> Result<ControlQuery> {
    if kind == DESCRIBE {
        return Ok(ControlQuery::Describe);
    }
    if kind == CHECK {
        return Ok(ControlQuery::Check(reader.str(TEXT_CAP)?));
    }
    let handoff = reader.fixed()?;
    Ok(match kind {
        RELEASE => ControlQuery::Release(handoff),
        RESULT => ControlQuery::Result(handoff),
        SUBSCRIBE => ControlQuery::Subscribe {
            handoff,
            lead: Duration::from_micros(reader.u64()?),
        },
        PROGRESS => ControlQuery::Progress {
            handoff,
            remaining: Duration::from_micros(reader.u64()?),
        },
        _ => ControlQuery::Watched(handoff),
    })
}

fn update(kind: u8, reader: &mut Reader<'_>) -> Result<HandoffUpdate> {
    Ok(match kind {
        OPENED => HandoffUpdate::Opened(Opening {
            prompt_hash: reader.fixed()?,
            num_tokens: reader.u32()?,
            ranks: reader.list(RANKS_CAP, |r| {
                Ok(Rank {
                    address: r.str(TEXT_CAP)?,
                    incarnation: r.fixed()?,
                })
            })?,
            stages: reader.list(STAGES_CAP, |r| r.list(GROUPS_CAP, Reader::u32))?,
            adapter: reader.str(TEXT_CAP)?,
        }),
        FINISHED => HandoffUpdate::Finished(SequenceState {
            output_ids: reader.list(OUTPUT_IDS_CAP, Reader::u32)?,
            finish_reason: reader.str(TEXT_CAP)?,
            num_cached_tokens: reader.u32()?,
            sampling_hash: reader.fixed()?,
        }),
        _ => HandoffUpdate::Ended(reader.str(TEXT_CAP)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_message_decodes_to_itself() {
        let rank = Rank {
            address: "127.0.0.1:1".to_owned(),
            incarnation: [3; 16],
        };
        let opening = Opening {
            prompt_hash: [9; 32],
            num_tokens: 5,
            ranks: vec![rank],
            stages: vec![vec![2, 0], vec![1, 3]],
            adapter: "adapter 0a1b".to_owned(),
        };
        let state = SequenceState {
            output_ids: vec![1, 2],
            finish_reason: "stop".to_owned(),
            num_cached_tokens: 4,
            sampling_hash: [8; 32],
        };
        let handoff = [1; 16];
        for message in [
            ControlMessage::Watch(handoff),
            ControlMessage::Unwatch {
                handoff,
                is_acknowledged: true,
            },
            ControlMessage::Update {
                handoff,
                update: HandoffUpdate::Opened(opening),
            },
            ControlMessage::Update {
                handoff,
                update: HandoffUpdate::Finished(state),
            },
            ControlMessage::Update {
                handoff,
                update: HandoffUpdate::Ended("aborted".to_owned()),
            },
            ControlMessage::Query {
                id: 1,
                query: ControlQuery::Describe,
            },
            ControlMessage::Query {
                id: 2,
                query: ControlQuery::Release(handoff),
            },
            ControlMessage::Query {
                id: 3,
                query: ControlQuery::Result(handoff),
            },
            ControlMessage::Query {
                id: 5,
                query: ControlQuery::Subscribe {
                    handoff,
                    lead: Duration::from_millis(200),
                },
            },
            ControlMessage::Query {
                id: 6,
                query: ControlQuery::Watched(handoff),
            },
            ControlMessage::Query {
                id: 7,
                query: ControlQuery::Progress {
                    handoff,
                    remaining: Duration::from_millis(70),
                },
            },
            ControlMessage::Query {
                id: 8,
                query: ControlQuery::Check("10.0.0.7:7001".to_owned()),
            },
        ] {
            assert_eq!(ControlMessage::decode(&message.encode()).unwrap(), message);
        }
    }

    #[test]
    fn every_reply_decodes_to_itself() {
        let (json, reason) = (|| "{}".to_owned(), || "a \"reason\"".to_owned());
        let remaining = Duration::from_micros(70);
        for reply in [
            ControlReply::Description(json()),
            ControlReply::Result(Some(json())),
            ControlReply::Result(None),
            ControlReply::Known(true),
            ControlReply::Moment(Moment::Due(remaining)),
            ControlReply::Moment(Moment::Finished(Some(remaining))),
            ControlReply::Moment(Moment::Finished(None)),
            ControlReply::Moment(Moment::Watched),
            ControlReply::Moment(Moment::Ended(reason())),
            ControlReply::Checked(reason()),
        ] {
            let message = ControlMessage::Reply { id: 4, reply };
            assert_eq!(ControlMessage::decode(&message.encode()).unwrap(), message);
        }
    }

    proptest! {
        #[test]
        fn any_frame_decodes_to_a_message_or_an_error(frame: Vec<u8>) {
            let _ = ControlMessage::decode(&frame);
        }

        #[test]
        fn a_truncated_message_is_an_error(cut in 0usize..32) {
            let update = HandoffUpdate::Ended("a reason".to_owned());
            let frame = ControlMessage::Update { handoff: [1; 16], update }.encode();
            prop_assume!(cut < frame.len());
            prop_assert!(ControlMessage::decode(&frame[..cut]).is_err());
        }
    }
}
