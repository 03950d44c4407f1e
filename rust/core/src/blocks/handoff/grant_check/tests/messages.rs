//! Messages of a load without checksums, and its reaction to a byte that changes on its way.

use std::cell::Cell;
use std::rc::Rc;

use super::*;
use crate::session::wire;
use crate::transfer::message::DATA;

/// Counts the messages of this thread that ask whether a grant holds.
fn count_questions() -> Rc<Cell<usize>> {
    let question = HandoffMessage::Validate {
        epoch: 0,
        question: 0,
    };
    let kind = question.to_bytes(&ID).0[0];
    let count = Rc::new(Cell::new(0));
    let counted = Rc::clone(&count);
    wire::tap(move |header, _| {
        if header[KIND_AT] == kind {
            counted.set(counted.get() + 1);
        }
    });
    count
}

#[test]
fn a_load_that_is_cancelled_asks_once_if_its_blocks_may_count_and_else_not_at_all() {
    for path in PATHS {
        for (is_withdrawn, num_questions) in [(false, 1), (true, 0)] {
            let asked = count_questions();
            let (producer, consumer) = load_in_part(path, Integrity::Validate);
            let cancelled = consumer.agent.cancel(ID, "aborted", is_withdrawn);
            cancelled.expect("it runs");
            settle(&[&producer.agent, &consumer.agent]);
            let ended = consumer.ended();
            let Some(Event::LoadFailed(_, failure)) = ended else {
                panic!("{ended:?}");
            };
            let missing: &[u32] = if is_withdrawn { &[0, 1] } else { &[1] };
            assert_eq!(failure.missing, missing);
            assert_eq!(asked.get(), num_questions, "{path:?} {is_withdrawn}");
        }
    }
}

#[test]
fn a_byte_that_changes_on_its_way_is_noticed_although_the_block_has_no_checksum() {
    let has_changed = Rc::new(Cell::new(false));
    let changed = Rc::clone(&has_changed);
    wire::tap(move |header, body| {
        if header[KIND_AT] == DATA && !changed.replace(true) {
            body[17] ^= 1;
        }
    });
    let [producer, consumer] = [1, 0].map(|content| side(MemoryPath::Stream, content));
    producer.mark_ready([ID].into_iter());
    consumer.load(ID, &producer);
    settle(&[&producer.agent, &consumer.agent]);
    assert!(has_changed.get());
    let ended = consumer.ended();
    let Some(Event::LoadCompleted(report)) = ended else {
        panic!("{ended:?}");
    };
    let counts = report.counts;
    assert_eq!((counts.num_retried, counts.num_compared), (1, 0));
    assert_eq!(consumer.content(), [1; BLOCK]);
}
