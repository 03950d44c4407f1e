use super::*;

const ID: HandoffId = [7; 16];

fn consumer(is_committed: bool) -> Consumer {
    let mut consumer = Consumer::default();
    let load = Load {
        epoch: 3,
        max_batch: 2,
        first: 2,
        block_ids: vec![50, 51],
        num_regions: 2,
        is_committed,
    };
    consumer.begin(ID, load).unwrap();
    assert_eq!(consumer.select(&ID), Some((2, 4)));
    consumer
}

fn block(region: u16, position: u32) -> ReadyBlock {
    ReadyBlock {
        region,
        position,
        block_id: 9,
        checksum: 1,
    }
}

fn all() -> Vec<ReadyBlock> {
    vec![block(0, 2), block(0, 3), block(1, 2), block(1, 3)]
}

fn read_all(consumer: &mut Consumer) {
    for batch in consumer.blocks_announced(&ID, 3, &all()).unwrap() {
        consumer.read_completed(&ID, &batch, &[true, true], 10);
    }
}

/// The first block of each batch differs from its checksum.
fn corrupt(consumer: &mut Consumer, batches: &[ReadBatch]) {
    for batch in batches {
        let mut verified = vec![true; batch.blocks.len()];
        verified[0] = false;
        consumer.read_completed(&ID, batch, &verified, 10);
    }
}

fn failure(missing: &[u32], reason: &str) -> LoadFailure {
    LoadFailure {
        missing: missing.to_vec(),
        reason: reason.to_owned(),
    }
}

#[test]
fn all_blocks_and_the_sequence_state_end_a_load_once() {
    let mut consumer = consumer(false);
    read_all(&mut consumer);
    assert_eq!(consumer.next_outcome(&ID), None);
    consumer.commit(&ID);
    let counts = LoadCounts {
        num_bytes: 20,
        num_received: 2,
        num_compared: 4,
        ..LoadCounts::default()
    };
    let failure = None;
    assert_eq!(
        consumer.next_outcome(&ID),
        Some(LoadOutcome { counts, failure })
    );
    assert_eq!(consumer.next_outcome(&ID), None);
}

#[test]
fn a_load_whose_blocks_are_all_verified_is_reported_once_and_not_over() {
    let mut consumer = consumer(false);
    let batches = consumer.blocks_announced(&ID, 3, &all()).unwrap();
    consumer.read_completed(&ID, &batches[0], &[true, true], 10);
    assert_eq!(consumer.next_verified(&ID), None);
    consumer.read_completed(&ID, &batches[1], &[true, true], 10);
    let verified = consumer.next_verified(&ID).unwrap();
    assert_eq!(
        (verified.counts.num_received, verified.is_committed),
        (2, false)
    );
    assert_eq!(consumer.next_verified(&ID), None);
    assert_eq!(consumer.next_outcome(&ID), None);
}

#[test]
fn a_load_that_lacks_a_block_or_has_failed_is_never_reported_as_verified() {
    let mut lacking = consumer(true);
    let batches = lacking.blocks_announced(&ID, 3, &all()).unwrap();
    corrupt(&mut lacking, &batches);
    assert_eq!(lacking.next_verified(&ID), None);
    let retries = lacking.next_retries(&ID);
    corrupt(&mut lacking, &retries);
    assert_eq!(lacking.next_verified(&ID), None);
    let mut failed = consumer(false);
    read_all(&mut failed);
    failed.fail(&ID, "the request was aborted");
    assert_eq!(failed.next_verified(&ID), None);
}

#[test]
fn a_withdrawn_load_misses_every_block() {
    let mut consumer = consumer(false);
    read_all(&mut consumer);
    consumer.withdraw(&ID);
    consumer.fail(&ID, "preempted");
    let outcome = consumer.next_outcome(&ID).unwrap();
    assert_eq!(outcome.failure, Some(failure(&[0, 1], "preempted")));
    assert_eq!(outcome.counts.num_received, 0);
}

#[test]
fn a_failed_load_ends_after_its_last_read() {
    let mut consumer = consumer(true);
    let batches = consumer.blocks_announced(&ID, 3, &all()).unwrap();
    consumer.read_completed(&ID, &batches[0], &[true, true], 10);
    consumer.fail(&ID, "lost");
    assert_eq!(consumer.next_outcome(&ID), None);
    consumer.read_failed(&ID, &batches[1], "late");
    assert_eq!(consumer.next_retries(&ID), []);
    let outcome = consumer.next_outcome(&ID).unwrap();
    assert_eq!(outcome.failure, Some(failure(&[0, 1], "lost")));
}

#[test]
fn a_corrupt_block_is_read_once_more_and_verified() {
    let mut consumer = consumer(true);
    let batches = consumer.blocks_announced(&ID, 3, &all()).unwrap();
    corrupt(&mut consumer, &batches);
    assert_eq!(consumer.next_outcome(&ID), None);
    let retries = consumer.next_retries(&ID);
    assert_eq!(retries.len(), 2);
    for batch in &retries {
        assert!(batch.is_retry && !consumer.is_reading(&[8; 16]));
        assert_eq!(
            (batch.blocks[0].position, &batch.local_ids[..]),
            (2, &[50][..])
        );
        consumer.read_completed(&ID, batch, &[true], 5);
    }
    let outcome = consumer.next_outcome(&ID).unwrap();
    assert_eq!(outcome.failure, None);
    let counts = LoadCounts {
        num_bytes: 30,
        num_received: 2,
        num_missing: 0,
        num_retried: 1,
        num_compared: 6,
        num_corrupt: 2,
        ..LoadCounts::default()
    };
    assert_eq!(outcome.counts, counts);
}

#[test]
fn a_block_that_is_corrupt_twice_is_missing_and_the_others_are_not() {
    let mut consumer = consumer(true);
    let batches = consumer.blocks_announced(&ID, 3, &all()).unwrap();
    corrupt(&mut consumer, &batches);
    let retries = consumer.next_retries(&ID);
    corrupt(&mut consumer, &retries);
    assert_eq!(consumer.next_retries(&ID), []);
    let outcome = consumer.next_outcome(&ID).unwrap();
    let reason = "block 2 of region 0 differs from its checksum";
    assert_eq!(outcome.failure, Some(failure(&[0], reason)));
    let (received, missing) = (outcome.counts.num_received, outcome.counts.num_missing);
    assert_eq!((received, missing, outcome.counts.num_retried), (1, 1, 1));
}

#[test]
fn a_failed_read_is_repeated_once_and_no_oftener() {
    let mut consumer = consumer(true);
    for is_retry in [false, true] {
        let mut batches = consumer.blocks_announced(&ID, 3, &all()).unwrap();
        batches.extend(consumer.next_retries(&ID));
        assert_eq!(batches.len(), 2);
        for batch in &batches {
            assert_eq!(batch.is_retry, is_retry);
            assert_eq!(consumer.next_outcome(&ID), None);
            consumer.read_failed(&ID, batch, "refused");
        }
    }
    let outcome = consumer.next_outcome(&ID).unwrap();
    assert_eq!(outcome.failure, Some(failure(&[0, 1], "refused")));
}

#[test]
fn a_lost_block_ends_the_load_when_all_before_it_are_verified() {
    let mut consumer = consumer(false);
    for _ in 0..2 {
        let mut batches = consumer.blocks_announced(&ID, 3, &[block(0, 3)]).unwrap();
        batches.extend(consumer.next_retries(&ID));
        corrupt(&mut consumer, &batches);
    }
    // The first block may still come: without it none before the hole could be used.
    assert_eq!(consumer.next_outcome(&ID), None);
    let wanted = consumer.blocks_announced(&ID, 3, &all()).unwrap();
    let positions = wanted.iter().flat_map(|batch| &batch.blocks);
    assert!(positions.into_iter().all(|block| block.position == 2));
    for batch in &wanted {
        consumer.read_completed(&ID, batch, &[true], 5);
    }
    let outcome = consumer.next_outcome(&ID).unwrap();
    assert_eq!(outcome.failure.unwrap().missing, [1]);
}

#[test]
fn a_fresh_session_reads_what_is_missing_and_repeats_reads_that_failed() {
    let mut consumer = consumer(true);
    let first = [block(0, 2), block(1, 2)];
    let batches = consumer.blocks_announced(&ID, 3, &first).unwrap();
    consumer.read_completed(&ID, &batches[0], &[true], 5);
    assert!(consumer.is_reading(&ID));
    consumer.read_failed(&ID, &batches[1], "lost peer");
    assert!(!consumer.is_reading(&ID));
    assert_eq!(consumer.select(&ID), Some((2, 4)));
    assert_eq!(consumer.next_retries(&ID), []);
    let batches = consumer.blocks_announced(&ID, 3, &all()).unwrap();
    let wanted = |batch: &ReadBatch| (batch.region, batch.is_retry, batch.blocks[0].position);
    let wanted: Vec<_> = batches.iter().map(wanted).collect();
    assert_eq!(wanted, [(0, false, 3), (1, false, 3), (1, true, 2)]);
    for batch in &batches {
        consumer.read_completed(&ID, batch, &[true], 5);
    }
    let outcome = consumer.next_outcome(&ID).unwrap();
    assert_eq!((outcome.failure, outcome.counts.num_retried), (None, 1));
}

#[test]
fn blocks_of_another_epoch_are_not_read() {
    assert_eq!(consumer(true).blocks_announced(&ID, 2, &all()).unwrap(), []);
}

#[test]
fn blocks_that_were_not_selected_are_not_read() {
    let blocks = [block(0, 4), block(0, 1), block(0, 3)];
    let batches = consumer(true).blocks_announced(&ID, 3, &blocks).unwrap();
    assert_eq!(batches.len(), 1);
    assert_eq!(batches[0].blocks, [block(0, 3)]);
    assert_eq!(batches[0].local_ids, [51]);
}

#[test]
fn many_blocks_are_read_in_batches_of_bounded_size() {
    let mut consumer = Consumer::default();
    let load = Load {
        epoch: 0,
        max_batch: 2,
        first: 0,
        block_ids: (0..5).collect(),
        num_regions: 1,
        is_committed: true,
    };
    consumer.begin(ID, load).unwrap();
    consumer.select(&ID);
    let blocks: Vec<ReadyBlock> = (0..5).map(|position| block(0, position)).collect();
    let batches = consumer.blocks_announced(&ID, 0, &blocks).unwrap();
    assert_eq!(
        batches
            .iter()
            .map(|batch| &batch.local_ids[..])
            .collect::<Vec<_>>(),
        [&[0, 1][..], &[2, 3], &[4]]
    );
    for batch in &batches {
        assert_eq!(consumer.next_outcome(&ID), None);
        consumer.read_completed(&ID, batch, &vec![true; batch.blocks.len()], 1);
    }
    let outcome = consumer.next_outcome(&ID).unwrap();
    assert_eq!((outcome.counts.num_bytes, outcome.failure), (3, None));
}

#[test]
fn a_block_of_an_unknown_region_is_an_error() {
    assert!(
        consumer(true)
            .blocks_announced(&ID, 3, &[block(2, 2)])
            .is_err()
    );
}

#[test]
fn a_block_announced_twice_is_read_once() {
    let mut consumer = consumer(true);
    consumer.blocks_announced(&ID, 3, &all()).unwrap();
    assert_eq!(
        consumer.blocks_announced(&ID, 3, &[block(0, 2)]).unwrap(),
        []
    );
}

#[test]
fn a_block_announced_twice_in_one_region_does_not_stand_for_another_region() {
    let mut consumer = consumer(true);
    let twice = [block(0, 2), block(0, 2), block(0, 3), block(0, 3)];
    for batch in consumer.blocks_announced(&ID, 3, &twice).unwrap() {
        let verified = vec![true; batch.blocks.len()];
        consumer.read_completed(&ID, &batch, &verified, 10);
    }
    assert_eq!(consumer.next_outcome(&ID), None);
}

#[test]
fn an_empty_load_ends_only_after_its_selection() {
    let mut consumer = Consumer::default();
    let load = Load {
        epoch: 0,
        max_batch: 2,
        first: 0,
        block_ids: vec![],
        num_regions: 1,
        is_committed: true,
    };
    consumer.begin(ID, load).unwrap();
    assert_eq!(consumer.next_outcome(&ID), None);
    consumer.select(&ID);
    assert_eq!(consumer.next_outcome(&ID).unwrap().failure, None);
}
