//! What fuzz targets use of a control port: its rounds, and its messages.

use std::time::Duration;

use super::messages::ControlMessage;
use super::{Control, ControlQuery, Opening, SequenceState};
use crate::ids::HandoffId;
use crate::reactor::manual::Round;

impl Control {
    pub(crate) fn round(&self) -> Round {
        self.reactor.round()
    }
}

/// A message that decodes encodes to the same bytes.
pub(crate) fn decode(bytes: &[u8]) {
    if let Ok(message) = ControlMessage::decode(bytes) {
        assert_eq!(message.encode(), bytes);
    }
}

/// One message of each kind.
pub(crate) fn messages(handoff: HandoffId, opening: Opening, state: SequenceState) -> Vec<Vec<u8>> {
    let query = |query| ControlMessage::Query { id: 1, query };
    let messages = [
        ControlMessage::Watch(handoff),
        ControlMessage::Opened { handoff, opening },
        ControlMessage::Finished { handoff, state },
        ControlMessage::Ended {
            handoff,
            reason: "aborted".to_owned(),
        },
        ControlMessage::Unwatch {
            handoff,
            is_acknowledged: true,
        },
        query(ControlQuery::Describe),
        query(ControlQuery::Release(handoff)),
        query(ControlQuery::Result(handoff)),
        query(ControlQuery::Subscribe {
            handoff,
            lead: Duration::from_millis(200),
        }),
        query(ControlQuery::Watched(handoff)),
        query(ControlQuery::Progress {
            handoff,
            remaining: Duration::from_millis(70),
        }),
        ControlMessage::Reply {
            id: 1,
            json: "{}".to_owned(),
        },
    ];
    messages.iter().map(ControlMessage::encode).collect()
}
