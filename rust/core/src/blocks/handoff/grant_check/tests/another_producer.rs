//! Another producer, with a session of its own, sends what is about a load from this one.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use super::*;
use crate::session::wire;

/// The handoff that the consumer loads from the other producer.
const OTHER: HandoffId = [8; 16];
/// Position of the handoff's id in a header.
const HANDOFF: Range<usize> = KIND_AT + 1..KIND_AT + 17;

fn kind(message: &HandoffMessage) -> u8 {
    message.to_bytes(&ID).0[0]
}

#[test]
fn an_answer_of_another_producer_counts_nothing_although_it_repeats_the_question() {
    let (epoch, question) = (0, 0);
    let asks = kind(&HandoffMessage::Validate { epoch, question });
    let answers = kind(&HandoffMessage::Valid { question });
    let (asked, num_answers) = (Cell::new([0; 8]), Rc::new(Cell::new(0)));
    let counted = Rc::clone(&num_answers);
    wire::tap(move |header, _| {
        let number = header.len() - size_of::<u64>()..;
        if header[KIND_AT] == asks && header[HANDOFF] == ID {
            asked.set(header[number].try_into().expect("a number"));
        } else if header[KIND_AT] == answers && header[HANDOFF] == OTHER {
            header[HANDOFF].copy_from_slice(&ID);
            header[number].copy_from_slice(&asked.get());
            counted.set(counted.get() + 1);
        }
    });
    let ([producer, consumer], another) = (awaiting_answer(), side(MemoryPath::RemoteRead, 2));
    producer.agent.handoffs.mark_ended(ID);
    another.mark_ready([OTHER].into_iter());
    consumer.load(OTHER, &another);
    settle(&[&another.agent, &consumer.agent]);
    assert_eq!((num_answers.get(), consumer.ended()), (1, None));
    settle(&[&producer.agent, &consumer.agent]);
    assert_nothing_counts(consumer.ended());
}

#[test]
fn an_announcement_of_another_producer_is_not_read() {
    let (epoch, blocks) = (0, Vec::new());
    let announces = kind(&HandoffMessage::BlocksReady { epoch, blocks });
    let num_announced = Rc::new(Cell::new(0));
    let counted = Rc::clone(&num_announced);
    wire::tap(move |header, _| {
        if header[KIND_AT] == announces && header[HANDOFF] == OTHER {
            header[HANDOFF].copy_from_slice(&ID);
            counted.set(counted.get() + 1);
        }
    });
    for path in PATHS {
        let [producer, another, consumer] = [1, 2, 0].map(|content| side(path, content));
        let agents = [&producer.agent, &another.agent, &consumer.agent];
        consumer.load(ID, &producer);
        consumer.load(OTHER, &another);
        settle(&agents);
        another.mark_ready([OTHER].into_iter());
        settle(&agents);
        assert_eq!(num_announced.replace(0), 1);
        assert_eq!(consumer.content(), [0; BLOCK]);
        producer.mark_ready([ID].into_iter());
        settle(&agents);
        completed(consumer.ended());
        assert_eq!(consumer.content(), [1; BLOCK]);
    }
}
