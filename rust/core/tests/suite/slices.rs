//! Slices of blocks: consumers that load a part of each block, or each block from several producers, as ranks of tensor
//! parallelism of another size do.

use kvpipe_core::Integrity;
use kvpipe_core::blocks::handoff::{Event, LoadPart, LoadReport, LoadRequest};
use kvpipe_core::region::Slice;
use kvpipe_core::transport::Transport;

use crate::common::{TIMEOUT, eventually, on_every_path};
use crate::workers::{BLOCK, ID, LAYERS, Worker, worker, worker_of};

const HALF: usize = BLOCK / 2;

/// A worker with half of the heads.
fn half(transport: &Transport, seed: u64) -> Worker {
    worker_of(transport, seed, Integrity::Auto, HALF)
}

/// A load of one half of the producer's blocks.
fn of_half(producer: &Worker, index: u32, block_ids: &[u32]) -> LoadRequest {
    LoadRequest {
        source_slice: Some(Slice { index, count: 2 }),
        is_shared: true,
        ..producer.request(block_ids)
    }
}

fn report(worker: &Worker) -> LoadReport {
    match worker.ended() {
        Event::LoadCompleted(report) => report,
        other => panic!("{other:?}"),
    }
}

/// Half of a block of the producer.
fn half_of(producer: &Worker, layer: usize, id: u32, index: usize) -> Vec<u8> {
    producer.block(layer, id)[index * HALF..][..HALF].to_vec()
}

fn has_half(consumer: &Worker, ids: &[u32], producer: &Worker, from: &[u32], index: usize) -> bool {
    (0..LAYERS).all(|layer| {
        let mut pairs = ids.iter().zip(from);
        pairs.all(|(&id, &from)| consumer.block(layer, id) == half_of(producer, layer, from, index))
    })
}

#[test]
fn two_workers_load_a_half_of_each_block_and_compare_its_checksum() {
    on_every_path(|transport| {
        let (producer, consumers) = (
            worker(transport, 100),
            [900, 901].map(|it| half(transport, it)),
        );
        consumers[0].load(of_half(&producer, 0, &[1, 2, 3]));
        producer.mark_ready(0, &[4, 9]);
        producer.mark_ready(2, &[5]);
        consumers[1].load(of_half(&producer, 1, &[20, 22, 21]));
        for (consumer, (ids, index)) in consumers.iter().zip([([1, 2, 3], 0), ([20, 22, 21], 1)]) {
            let counts = report(consumer).counts;
            assert_eq!(counts.num_bytes, (3 * LAYERS * HALF) as u64);
            assert_eq!(
                (counts.num_compared, counts.num_corrupt),
                (3 * LAYERS as u64, 0)
            );
            assert!(has_half(consumer, &ids, &producer, &[4, 9, 5], index));
        }
        assert_eq!(
            producer.agent.num_leased(),
            1,
            "the scheduler ends what is shared"
        );
        assert_eq!(producer.events(), []);
    });
}

#[test]
fn blocks_that_were_ready_before_they_were_divided_have_slices() {
    on_every_path(|transport| {
        let (producer, consumer) = (worker(transport, 100), half(transport, 900));
        producer.mark_ready(0, &[4, 5, 6]);
        producer.mark_ready(5, &[7]);
        eventually("the checksums", || {
            (producer.agent.num_leased() == 1).then_some(())
        });
        consumer.load(of_half(&producer, 1, &[1, 2, 3]));
        assert_eq!(report(&consumer).counts.num_compared, 3 * LAYERS as u64);
        assert!(has_half(&consumer, &[1, 2, 3], &producer, &[4, 5, 6], 1));
    });
}

#[test]
fn whole_blocks_are_loaded_from_a_worker_that_others_load_slices_of() {
    on_every_path(|transport| {
        let (producer, consumer) = (worker(transport, 100), half(transport, 900));
        producer.mark_ready(0, &[4]);
        eventually("the checksums", || {
            (producer.agent.num_leased() == 1).then_some(())
        });
        consumer.load(of_half(&producer, 0, &[1]));
        report(&consumer);
        // Of the first block the checksum was computed before it was divided, of the second one it follows from the slices'.
        producer.mark_ready(1, &[5]);
        let whole = worker(transport, 901);
        whole.load(producer.request(&[1, 2]));
        let counts = report(&whole).counts;
        assert_eq!(
            (counts.num_compared, counts.num_corrupt),
            (2 * LAYERS as u64, 0)
        );
        assert!(whole.has(&[1, 2], &producer, &[4, 5]));
    });
}

#[test]
fn a_changed_byte_is_found_by_the_worker_whose_slice_has_it() {
    on_every_path(|transport| {
        let (producer, consumers) = (
            worker(transport, 100),
            [900, 901].map(|it| half(transport, it)),
        );
        producer.mark_ready(0, &[4, 5]);
        consumers[0].load(of_half(&producer, 0, &[1, 2]));
        report(&consumers[0]);
        assert!(producer.layers[1].write(5 * BLOCK + HALF + 17, b"!"));
        let first = half(transport, 902);
        first.load(of_half(&producer, 0, &[1, 2]));
        report(&first);
        consumers[1].load(of_half(&producer, 1, &[1, 2]));
        let (missing, reason) = consumers[1].failed();
        assert_eq!(missing, [1]);
        assert!(reason.contains("checksum"), "{reason}");
    });
}

#[test]
fn a_worker_loads_its_blocks_from_two_that_have_half_of_them_each() {
    on_every_path(|transport| {
        let (consumer, producers) = (
            worker(transport, 900),
            [100, 200].map(|it| half(transport, it)),
        );
        for (rank, producer) in producers.iter().enumerate() {
            consumer.load(LoadRequest {
                rank: rank as u16,
                destination_slice: Some(Slice {
                    index: rank as u32,
                    count: 2,
                }),
                is_committed: false,
                ..producer.request(&[1, 2])
            });
            producer.mark_ready(0, &[rank as u32 + 4, 9]);
        }
        let is_verified = |event: &Event| matches!(event, Event::BlocksVerified(_));
        eventually("both verified", || {
            let verified = consumer
                .events()
                .iter()
                .filter(|it| is_verified(it))
                .count();
            (verified == 2).then_some(())
        });
        consumer.agent.commit(ID).expect("commit");
        let mut ranks = eventually("both ends", || {
            let ended = consumer
                .events()
                .into_iter()
                .filter_map(|event| match event {
                    Event::LoadCompleted(report) => Some(report.rank),
                    _ => None,
                });
            let ended: Vec<_> = ended.collect();
            (ended.len() == 2).then_some(ended)
        });
        ranks.sort_unstable();
        assert_eq!(ranks, [0, 1]);
        for layer in 0..LAYERS {
            for (id, from) in [(1, [4, 5]), (2, [9, 9])] {
                let halves = [0, 1].map(|rank| producers[rank].block(layer, from[rank]));
                assert_eq!(consumer.block(layer, id), halves.concat());
            }
        }
        for producer in &producers {
            eventually("its ACK", || producer.events().first().cloned());
        }
    });
}

#[test]
fn a_cancel_ends_the_loads_from_all_workers() {
    on_every_path(|transport| {
        let (consumer, producers) = (
            half(transport, 900),
            [100, 200].map(|it| half(transport, it)),
        );
        for (rank, producer) in producers.iter().enumerate() {
            let regions = consumer.regions[rank..=rank].to_vec();
            consumer.load(LoadRequest {
                rank: rank as u16,
                parts: vec![LoadPart {
                    regions: Some(regions),
                    first: 0,
                    block_ids: vec![1],
                }],
                ..producer.request(&[])
            });
        }
        consumer
            .agent
            .cancel(ID, "by the test", true)
            .expect("cancel");
        eventually("both ends", || (consumer.events().len() == 2).then_some(()));
    });
}

#[test]
fn blocks_that_cannot_be_divided_so_are_named() {
    on_every_path(|transport| {
        let (producer, consumer) = (worker(transport, 100), half(transport, 900));
        producer.mark_ready(0, &[4]);
        let slice = |index, count| LoadRequest {
            source_slice: Some(Slice { index, count }),
            ..producer.request(&[1])
        };
        consumer.load(slice(0, 3));
        let (missing, reason) = consumer.failed();
        assert_eq!(missing, [0]);
        let expected = "region \"layer.0\": blocks of 8192 bytes cannot be divided into 3 slices";
        assert!(reason.contains(expected), "{reason}");
        consumer.seen.borrow_mut().clear();
        consumer.load(LoadRequest {
            destination_slice: Some(Slice { index: 0, count: 3 }),
            ..producer.request(&[1])
        });
        let (missing, reason) = consumer.failed();
        assert_eq!(missing, [0]);
        assert!(reason.contains("blocks of 4096 bytes"), "{reason}");
        for (index, count) in [(2, 2), (0, 1), (0, 257)] {
            assert!(consumer.agent.load(slice(index, count)).is_err());
        }
    });
}

#[test]
fn slices_are_closed_with_their_region() {
    on_every_path(|transport| {
        let (producer, consumer) = (worker(transport, 100), half(transport, 900));
        producer.mark_ready(0, &[4]);
        consumer.load(of_half(&producer, 0, &[1, 2]));
        eventually("the first block", || {
            has_half(&consumer, &[1], &producer, &[4], 0).then_some(())
        });
        let closing = producer.agent.close_region(&producer.regions[1], None);
        let closed = closing.expect("close").wait_for(TIMEOUT);
        closed.expect("closed");
        let (missing, reason) = consumer.failed();
        assert_eq!(missing, [1]);
        assert!(reason.contains("layer.1"), "{reason}");
    });
}
