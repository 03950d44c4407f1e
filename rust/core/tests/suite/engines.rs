//! Control ports of engines, as tests use them.

use std::cell::RefCell;
use std::time::Duration;

use kvpipe_core::control::{
    Control, ControlEvent, ControlQuery, ControlReply, ControlTimeouts, HandoffUpdate, Opening,
    Rank, SequenceState,
};
use kvpipe_core::ids::HandoffId;
use kvpipe_core::session::SessionTimeouts;

use crate::common::{TIMEOUT, TOKEN, eventually};

pub const ID: HandoffId = [3; 16];
pub const OTHER: HandoffId = [4; 16];

pub fn patience() -> ControlTimeouts {
    ControlTimeouts {
        session: SessionTimeouts::default(),
        lease: TIMEOUT,
        open: TIMEOUT,
        handoff: TIMEOUT,
    }
}

pub struct Engine {
    pub control: Control,
    seen: RefCell<Vec<ControlEvent>>,
}

pub fn engine_with(patience: ControlTimeouts, fingerprint: &[(&str, &str)]) -> Engine {
    let fields = fingerprint
        .iter()
        .map(|(field, value)| ((*field).to_owned(), (*value).to_owned()));
    let control = Control::new(
        Some("127.0.0.1:0"),
        TOKEN,
        "engine",
        fields.collect(),
        patience,
    );
    Engine {
        control: control.expect("control"),
        seen: RefCell::default(),
    }
}

pub fn engine() -> Engine {
    engine_with(patience(), &[])
}

pub fn opening() -> Opening {
    Opening {
        prompt_hash: [7; 32],
        num_tokens: 100,
        adapter: String::new(),
        ranks: vec![Rank {
            address: "10.0.0.1:7".to_owned(),
            incarnation: [5; 16],
        }],
        stages: Vec::new(),
    }
}

pub fn state() -> SequenceState {
    SequenceState {
        output_ids: vec![42],
        finish_reason: "length".to_owned(),
        num_cached_tokens: 16,
        sampling_hash: [8; 32],
    }
}

pub fn opened() -> ControlEvent {
    ControlEvent::Updated {
        handoff: ID,
        update: HandoffUpdate::Opened(opening()),
    }
}

pub fn finished() -> ControlEvent {
    ControlEvent::Updated {
        handoff: ID,
        update: HandoffUpdate::Finished(state()),
    }
}

impl Engine {
    pub fn address(&self) -> String {
        self.control.address().expect("address").to_string()
    }

    pub fn open(&self) {
        self.control.open(ID, opening()).expect("open");
    }

    pub fn finish(&self) {
        self.control.finish(ID, state()).expect("finish");
    }

    pub fn watch(&self, producer: &Self) {
        self.control.watch(ID, &producer.address()).expect("watch");
    }

    pub fn events(&self) -> Vec<ControlEvent> {
        let mut seen = self.seen.borrow_mut();
        let events = self.control.drain().into_iter();
        seen.extend(events.filter(|event| !matches!(event, ControlEvent::Log(_))));
        seen.clone()
    }

    pub fn sees(&self, expected: &[ControlEvent]) {
        eventually(&format!("{expected:?}"), || {
            (self.events().len() >= expected.len()).then_some(())
        });
        assert_eq!(self.events(), expected);
    }

    pub fn sees_nothing_more(&self, so_far: &[ControlEvent]) {
        std::thread::sleep(Duration::from_millis(80));
        assert_eq!(self.events(), so_far);
    }

    /// The reason of the one `Released`.
    pub fn released(&self) -> String {
        let events = eventually("Released", || {
            Some(self.events()).filter(|events| !events.is_empty())
        });
        match &events[..] {
            [
                ControlEvent::Released {
                    handoff: ID,
                    reason,
                },
            ] => reason.clone(),
            other => panic!("{other:?}"),
        }
    }

    /// The reason of the last event: `Ended` or `Lost`.
    pub fn ended(&self) -> String {
        eventually("Ended", || match self.events().last() {
            Some(
                ControlEvent::Lost {
                    handoff: ID,
                    reason,
                    ..
                }
                | ControlEvent::Updated {
                    handoff: ID,
                    update: HandoffUpdate::Ended(reason),
                },
            ) => Some(reason.clone()),
            _ => None,
        })
    }

    pub fn query(&self, other: &Self, query: ControlQuery) -> kvpipe_core::Result<ControlReply> {
        self.control
            .query(&other.address(), query, TIMEOUT)
            .expect("query")
            .wait_for(TIMEOUT)
    }
}
