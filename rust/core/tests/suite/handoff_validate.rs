//! Handoffs without checksums, over every data path: a block counts if the grant still held after the last read.

use std::time::{Duration, Instant};

use kvpipe_core::Integrity;
use kvpipe_core::blocks::handoff::Event;
use kvpipe_core::transport::Transport;

use crate::common::{eventually, on_every_path};
use crate::workers::{BLOCK, COUNT, ID, LAYERS, Worker, worker_with};

fn pair(transport: &Transport) -> (Worker, Worker) {
    let worker = |seed| worker_with(transport, seed, Integrity::Validate);
    (worker(100), worker(900))
}

/// A pair whose consumer loads three blocks. Two are here, and the third one is not ready.
fn with_first_blocks(transport: &Transport) -> (Worker, Worker) {
    let (producer, consumer) = pair(transport);
    producer.mark_ready(0, &[4, 9]);
    consumer.load(producer.request(&[1, 2, 3]));
    eventually("the first blocks", || {
        consumer.has(&[1, 2], &producer, &[4, 9]).then_some(())
    });
    (producer, consumer)
}

#[test]
fn a_load_is_validated_once_its_blocks_are_here() {
    on_every_path(|transport| {
        let (producer, consumer) = with_first_blocks(transport);
        assert_eq!(consumer.events(), []);
        producer.mark_ready(2, &[5]);
        let Event::LoadCompleted(report) = consumer.ended() else {
            panic!("{:?}", consumer.events());
        };
        let counts = report.counts;
        let num_blocks = 3 * LAYERS as u64;
        let found = (counts.num_validated, counts.num_compared);
        assert_eq!(found, (num_blocks, 0));
        assert!(consumer.has(&[1, 2, 3], &producer, &[4, 9, 5]));
        eventually("the end of the lease", || {
            producer.events().first().cloned()
        });
        assert_eq!(producer.events(), [Event::Acknowledged { handoff: ID }]);
    });
}

/// Ends of a handoff that are tried: 0.3 ms later each time.
const NUM_STEPS: u64 = 20;

#[test]
fn a_block_counts_only_as_it_was_when_its_grant_began_whenever_the_owner_ends_it() {
    on_every_path(|transport| {
        let (mut num_completed, mut num_failed) = (0, 0);
        for step in 0..NUM_STEPS {
            let (producer, consumer) = pair(transport);
            let blocks = |worker: &Worker, ids: [u32; 2]| {
                let layers = 0..LAYERS;
                let blocks = layers.flat_map(|layer| ids.map(|id| worker.block(layer, id)));
                blocks.collect::<Vec<_>>()
            };
            let before = blocks(&producer, [4, 9]);
            producer.mark_ready(0, &[4, 9]);
            eventually("the grant", || {
                (producer.agent.num_leased() == 1).then_some(())
            });
            consumer.load(producer.request(&[1, 2]));
            if step + 1 == NUM_STEPS {
                eventually("an answer before the end", || {
                    (!consumer.events().is_empty()).then_some(())
                });
            }
            let began = Instant::now();
            while began.elapsed() < Duration::from_micros(300 * step) {
                std::hint::spin_loop();
            }
            producer.agent.end(ID, "preempted").expect("end");
            for layer in &producer.layers {
                assert!(layer.write(0, &vec![7; COUNT * BLOCK]));
            }
            match consumer.ended() {
                Event::LoadCompleted(_) => {
                    num_completed += 1;
                    assert!(blocks(&consumer, [1, 2]) == before, "it has changed");
                }
                Event::LoadFailed(_, failure) => {
                    num_failed += 1;
                    assert_eq!(failure.missing, [0, 1]);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(num_completed + num_failed, NUM_STEPS);
        assert!(num_completed > 0, "some ends come after the answer");
        assert!(num_failed > 0, "some ends come before the answer");
    });
}

#[test]
fn a_load_that_is_cancelled_keeps_the_blocks_whose_grant_still_holds() {
    on_every_path(|transport| {
        let (_producer, consumer) = with_first_blocks(transport);
        consumer.settle();
        consumer.agent.cancel(ID, "late", false).expect("cancel");
        assert_eq!(consumer.failed(), (vec![2], "late".to_owned()));
    });
}

#[test]
fn a_producer_that_is_closed_before_the_answer_leaves_nothing() {
    on_every_path(|transport| {
        let (producer, consumer) = with_first_blocks(transport);
        producer.agent.close();
        assert_eq!(consumer.failed().0, [0, 1, 2]);
    });
}
