//! The owner ends a grant at every moment of a load: the consumer never counts a block that could have changed, and is sent
//! no byte that has.

use std::cell::Cell;
use std::rc::Rc;

use super::*;
use crate::clock;
use crate::session::wire;

/// Rounds after which the reactor processes an end that its owner has marked.
const NUM_ROUNDS_LATE: usize = 100;
/// That of the first grant.
const FIRST_EPOCH: Epoch = 0;

/// Ways in which the owner ends a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// It ends the handoff, which the reactor processes in its next round.
    Processed,
    /// It has marked the end, which the reactor processes many rounds later.
    MarkedOnly,
    /// It ends the handoff, which is forgotten, and its id is used again for other content.
    Reused,
}

impl Ending {
    fn begin(self, producer: &Side) {
        match self {
            Self::Processed => producer.agent.end(ID, "preempted").expect("it runs"),
            Self::MarkedOnly => producer.agent.handoffs.mark_ended(ID),
            Self::Reused => end_and_forget(producer),
        }
        // The blocks may change from now on.
        producer.fill(9);
        if let Self::Reused = self {
            producer.mark_ready([ID].into_iter());
        }
    }
}

/// The epoch that is announced first from now on, once it is.
fn first_announced() -> Rc<Cell<Option<Epoch>>> {
    let epoch = 0;
    let blocks = Vec::new();
    let (header, _) = HandoffMessage::BlocksReady { epoch, blocks }.to_bytes(&ID);
    let (kind, epoch_at) = (header[0], KIND_AT + header.len() - size_of::<Epoch>());
    let first = Rc::new(Cell::new(None));
    let seen = Rc::clone(&first);
    wire::tap(move |header, _| {
        if header[KIND_AT] == kind && seen.get().is_none() {
            let epoch = header[epoch_at..].try_into().expect("an epoch");
            seen.set(Some(Epoch::from_le_bytes(epoch)));
        }
    });
    first
}

/// Outcome of a load.
struct Outcome {
    event: Event,
    /// True if the grant ended before the load.
    has_grant_ended: bool,
    /// Of the first announcement to the load.
    epoch: Option<Epoch>,
}

/// Runs a load whose grant ends after so many rounds, and fails if it counts a block of which some of the content is not
/// that of the grant it was first announced in. The second region is ready when the first one is here: a load may have
/// read one before the end and one after it.
fn ends_after(
    path: MemoryPath,
    ending: Ending,
    num_rounds: usize,
    is_consumer_first: bool,
) -> Outcome {
    let [producer, consumer] = [1, 0].map(|content| Side::with_two_regions(path, content));
    let announced = first_announced();
    producer.mark_ready_in(0..1, 0, [ID].into_iter());
    consumer.load(ID, &producer);
    let mut agents = [&producer.agent, &consumer.agent];
    if is_consumer_first {
        agents.reverse();
    }
    let (mut has_grant_ended, mut is_all_ready) = (false, false);
    for round in 0.. {
        let num_late = if ending == Ending::MarkedOnly {
            NUM_ROUNDS_LATE
        } else {
            0
        };
        if round == num_rounds {
            ending.begin(&producer);
            has_grant_ended = true;
        } else if round == num_rounds + num_late {
            producer.agent.end(ID, "preempted").expect("it runs");
        }
        let content = consumer.content();
        if !has_grant_ended && !is_all_ready && content[..2 * BLOCK] == [1; 2 * BLOCK] {
            producer.mark_ready_in(1..2, 0, [ID].into_iter());
            is_all_ready = true;
        }
        agents[round % 2].round();
        if let Some(event) = consumer.ended() {
            let epoch = announced.get();
            let granted = if epoch == Some(FIRST_EPOCH) { 1 } else { 9 };
            let content = consumer.content();
            let is_streamed_late = epoch == Some(FIRST_EPOCH) && content.contains(&9);
            let is_of_reads = path == MemoryPath::RemoteRead;
            assert!(is_of_reads || !is_streamed_late, "{ending:?} {num_rounds}");
            let counts = match &event {
                Event::LoadFailed(_, failure) => failure.missing.len() < 2,
                _ => true,
            };
            let is_right = !counts || content == vec![granted; content.len()];
            assert!(is_right, "{path:?} {ending:?} {num_rounds}: {event:?}");
            return Outcome {
                event,
                has_grant_ended,
                epoch,
            };
        }
        assert!(round < 1000, "{path:?} {ending:?} {num_rounds}: no end");
    }
    unreachable!("the rounds are not bounded");
}

#[test]
fn a_grant_that_ends_at_any_moment_leaves_no_block_that_could_have_changed() {
    clock::stop();
    for path in PATHS {
        for ending in [Ending::Processed, Ending::MarkedOnly, Ending::Reused] {
            for is_consumer_first in [false, true] {
                let (mut num_failed, mut num_of_second, mut num_rounds) = (0, 0, 0);
                loop {
                    let Outcome {
                        event,
                        has_grant_ended,
                        epoch,
                    } = ends_after(path, ending, num_rounds, is_consumer_first);
                    let is_completed = matches!(event, Event::LoadCompleted(_));
                    if !has_grant_ended {
                        assert!(is_completed, "{event:?}");
                        break;
                    }
                    num_failed += usize::from(!is_completed);
                    num_of_second += usize::from(is_completed && epoch == Some(FIRST_EPOCH + 1));
                    num_rounds += 1;
                }
                assert!(num_failed > 2, "{path:?} {ending:?}: {num_failed}");
                assert_eq!(num_of_second > 0, ending == Ending::Reused);
            }
        }
    }
}
