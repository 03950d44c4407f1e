//! What fuzz targets reach of a control port: its rounds, and its messages.

use std::time::Duration;

use super::messages::Message;
use super::{Control, Opening, Question, SequenceState};
use crate::handoff::HandoffId;
use crate::reactor::manual::Round;

impl Control {
    pub(crate) fn round(&self) -> Round {
        self.reactor.round()
    }
}

/// What can be read is written as it was.
pub(crate) fn decode(bytes: &[u8]) {
    if let Ok(message) = Message::decode(bytes) {
        assert_eq!(message.encode(), bytes);
    }
}

/// One message of each kind.
pub(crate) fn messages(handoff: HandoffId, opening: Opening, state: SequenceState) -> Vec<Vec<u8>> {
    let ask = |question| Message::Ask { id: 1, question };
    let messages = [
        Message::Watch(handoff),
        Message::Opened { handoff, opening },
        Message::Finished { handoff, state },
        Message::Ended {
            handoff,
            reason: "aborted".to_owned(),
        },
        Message::Unwatch {
            handoff,
            is_acknowledged: true,
        },
        ask(Question::Describe),
        ask(Question::Release(handoff)),
        ask(Question::Result(handoff)),
        ask(Question::Subscribe {
            handoff,
            lead: Duration::from_millis(200),
        }),
        ask(Question::Watched(handoff)),
        ask(Question::Progress {
            handoff,
            remaining: Duration::from_millis(70),
        }),
        Message::Answer {
            id: 1,
            json: "{}".to_owned(),
        },
    ];
    messages.iter().map(Message::encode).collect()
}
