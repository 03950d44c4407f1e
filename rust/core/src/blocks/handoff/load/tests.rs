mod validation;

use super::*;

fn request(first: u32, block_ids: Vec<u32>, is_committed: bool) -> LoadRequest {
    LoadRequest {
        handoff: [7; 16],
        producer: String::new(),
        incarnation: [0; 16],
        parts: vec![LoadPart::of_all_regions(first, block_ids)],
        is_committed,
        ..LoadRequest::default()
    }
}

/// Our two regions, and the producer's of the same names.
const OURS: [RegionId; 2] = [10, 11];
const THEIRS: [RegionId; 2] = [21, 20];

fn part(first: u32, end: u32, regions: &[RegionId]) -> SelectedPart {
    SelectedPart {
        first,
        end,
        regions: regions.to_vec(),
    }
}

fn selected(is_committed: bool) -> Load {
    let mut load = Load::new(request(2, vec![50, 51], is_committed), [OURS.to_vec()], 2);
    assert_eq!(load.select(&THEIRS), [part(2, 4, &THEIRS)]);
    load
}

/// A block of the producer's region with this name.
fn block(name: usize, position: u32) -> ReadyBlock {
    ReadyBlock {
        region: THEIRS[name],
        position,
        block_id: 9,
        checksum: Some(1),
    }
}

fn all() -> Vec<ReadyBlock> {
    vec![block(0, 2), block(0, 3), block(1, 2), block(1, 3)]
}

fn read_all(load: &mut Load) {
    for batch in load.blocks_announced(3, &all()).unwrap() {
        load.read_completed(&batch, &[true, true], 10);
    }
}

/// The first block of each batch differs from its checksum.
fn corrupt(load: &mut Load, batches: &[ReadBatch]) {
    for batch in batches {
        let mut verified = vec![true; batch.blocks.len()];
        verified[0] = false;
        load.read_completed(batch, &verified, 10);
    }
}

fn failure(missing: &[u32], reason: &str) -> LoadFailure {
    LoadFailure {
        missing: missing.to_vec(),
        reason: reason.to_owned(),
        cause: FailureCause::Other,
    }
}

#[test]
fn all_blocks_and_the_sequence_state_end_a_load() {
    let mut load = selected(false);
    read_all(&mut load);
    assert_eq!(load.outcome(), None);
    load.request.is_committed = true;
    let counts = LoadCounts {
        num_bytes: 20,
        num_received: 2,
        num_compared: 4,
        ..LoadCounts::default()
    };
    let failure = None;
    assert_eq!(load.outcome(), Some(LoadOutcome { counts, failure }));
}

#[test]
fn a_load_whose_blocks_are_all_verified_is_reported_once_and_not_over() {
    let mut load = selected(false);
    let batches = load.blocks_announced(3, &all()).unwrap();
    load.read_completed(&batches[0], &[true, true], 10);
    assert_eq!(load.next_verified(), None);
    load.read_completed(&batches[1], &[true, true], 10);
    let verified = load.next_verified().unwrap();
    assert_eq!(verified.num_received, 2);
    assert_eq!(load.next_verified(), None);
    assert_eq!(load.outcome(), None);
}

#[test]
fn a_load_that_lacks_a_block_or_has_failed_is_never_reported_as_verified() {
    let mut lacking = selected(true);
    let batches = lacking.blocks_announced(3, &all()).unwrap();
    corrupt(&mut lacking, &batches);
    assert_eq!(lacking.next_verified(), None);
    let retries = lacking.next_retries();
    corrupt(&mut lacking, &retries);
    assert_eq!(lacking.next_verified(), None);
    let mut failed = selected(false);
    read_all(&mut failed);
    failed.fail(FailureCause::Other, "the request was aborted");
    assert_eq!(failed.next_verified(), None);
}

#[test]
fn a_withdrawn_load_misses_every_block() {
    let mut load = selected(false);
    read_all(&mut load);
    load.withdraw();
    load.fail(FailureCause::Other, "preempted");
    let outcome = load.outcome().unwrap();
    assert_eq!(outcome.failure, Some(failure(&[0, 1], "preempted")));
    assert_eq!(outcome.counts.num_received, 0);
}

#[test]
fn a_failed_load_ends_after_its_last_read() {
    let mut load = selected(true);
    let batches = load.blocks_announced(3, &all()).unwrap();
    load.read_completed(&batches[0], &[true, true], 10);
    load.fail(FailureCause::Other, "lost");
    assert_eq!(load.outcome(), None);
    load.read_failed(&batches[1], "late");
    assert_eq!(load.next_retries(), []);
    let outcome = load.outcome().unwrap();
    assert_eq!(outcome.failure, Some(failure(&[0, 1], "lost")));
}

#[test]
fn a_corrupt_block_is_read_once_more_and_verified() {
    let mut load = selected(true);
    let batches = load.blocks_announced(3, &all()).unwrap();
    corrupt(&mut load, &batches);
    assert_eq!(load.outcome(), None);
    let retries = load.next_retries();
    assert_eq!(retries.len(), 2);
    for batch in &retries {
        assert!(batch.is_retry);
        assert_eq!(
            (batch.blocks[0].position, &batch.local_ids[..]),
            (2, &[50][..])
        );
        load.read_completed(batch, &[true], 5);
    }
    let outcome = load.outcome().unwrap();
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
    let mut load = selected(true);
    let batches = load.blocks_announced(3, &all()).unwrap();
    corrupt(&mut load, &batches);
    let retries = load.next_retries();
    corrupt(&mut load, &retries);
    assert_eq!(load.next_retries(), []);
    let outcome = load.outcome().unwrap();
    let reason = "block 2 of region 21 differs from its checksum";
    let failure = LoadFailure {
        cause: FailureCause::Corrupt,
        ..failure(&[0], reason)
    };
    assert_eq!(outcome.failure, Some(failure));
    let (received, missing) = (outcome.counts.num_received, outcome.counts.num_missing);
    assert_eq!((received, missing, outcome.counts.num_retried), (1, 1, 1));
}

#[test]
fn a_failed_read_is_repeated_once_and_no_oftener() {
    let mut load = selected(true);
    for is_retry in [false, true] {
        let mut batches = load.blocks_announced(3, &all()).unwrap();
        batches.extend(load.next_retries());
        assert_eq!(batches.len(), 2);
        for batch in &batches {
            assert_eq!(batch.is_retry, is_retry);
            assert_eq!(load.outcome(), None);
            load.read_failed(batch, "refused");
        }
    }
    let outcome = load.outcome().unwrap();
    assert_eq!(outcome.failure, Some(failure(&[0, 1], "refused")));
}

#[test]
fn a_lost_block_ends_the_load_when_all_before_it_are_verified() {
    let mut load = selected(false);
    for _ in 0..2 {
        let mut batches = load.blocks_announced(3, &[block(0, 3)]).unwrap();
        batches.extend(load.next_retries());
        corrupt(&mut load, &batches);
    }
    // The first block may still come: without it none before the hole could be used.
    assert_eq!(load.outcome(), None);
    let wanted = load.blocks_announced(3, &all()).unwrap();
    let positions = wanted.iter().flat_map(|batch| &batch.blocks);
    assert!(positions.into_iter().all(|block| block.position == 2));
    for batch in &wanted {
        load.read_completed(batch, &[true], 5);
    }
    let outcome = load.outcome().unwrap();
    assert_eq!(outcome.failure.unwrap().missing, [1]);
}

#[test]
fn a_fresh_session_reads_what_is_missing_and_repeats_reads_that_failed() {
    let mut load = selected(true);
    let first = [block(0, 2), block(1, 2)];
    let batches = load.blocks_announced(3, &first).unwrap();
    load.read_completed(&batches[0], &[true], 5);
    assert!(load.is_reading());
    load.read_failed(&batches[1], "lost peer");
    assert!(!load.is_reading());
    assert_eq!(load.select(&THEIRS), [part(2, 4, &THEIRS)]);
    assert_eq!(load.next_retries(), []);
    let batches = load.blocks_announced(3, &all()).unwrap();
    let wanted = |batch: &ReadBatch| (batch.place, batch.is_retry, batch.blocks[0].position);
    let wanted: Vec<_> = batches.iter().map(wanted).collect();
    assert_eq!(wanted, [(0, false, 3), (1, false, 3), (1, true, 2)]);
    for batch in &batches {
        load.read_completed(batch, &[true], 5);
    }
    let outcome = load.outcome().unwrap();
    assert_eq!((outcome.failure, outcome.counts.num_retried), (None, 1));
}

#[test]
fn a_load_has_the_epoch_of_its_first_announcement_and_another_one_later_withdraws_it() {
    let mut load = selected(true);
    load.blocks_announced(3, &[block(0, 2)]).unwrap();
    assert_eq!(load.blocks_announced(4, &all()), Err(Unreadable::Epoch));
    assert_eq!(load.blocks_announced(2, &all()), Err(Unreadable::Epoch));
    load.select(&THEIRS);
    assert_eq!(
        load.blocks_announced(4, &[]),
        Err(Unreadable::Epoch),
        "a fresh session does not change that"
    );
    let batches = load.blocks_announced(3, &all()).unwrap();
    assert!(batches.iter().all(|batch| batch.epoch == 3));
}

#[test]
fn blocks_that_were_not_selected_are_not_read() {
    let blocks = [block(0, 4), block(0, 1), block(0, 3)];
    let batches = selected(true).blocks_announced(3, &blocks).unwrap();
    assert_eq!(batches.len(), 1);
    assert_eq!(batches[0].blocks, [block(0, 3)]);
    assert_eq!(batches[0].local_ids, [51]);
}

#[test]
fn many_blocks_are_read_in_batches_of_bounded_size() {
    let mut load = Load::new(request(0, (0..5).collect(), true), [vec![10]], 2);
    load.select(&THEIRS[..1]);
    let blocks: Vec<ReadyBlock> = (0..5).map(|position| block(0, position)).collect();
    let batches = load.blocks_announced(0, &blocks).unwrap();
    assert_eq!(
        batches
            .iter()
            .map(|batch| &batch.local_ids[..])
            .collect::<Vec<_>>(),
        [&[0, 1][..], &[2, 3], &[4]]
    );
    for batch in &batches {
        assert_eq!(load.outcome(), None);
        load.read_completed(batch, &vec![true; batch.blocks.len()], 1);
    }
    let outcome = load.outcome().unwrap();
    assert_eq!((outcome.counts.num_bytes, outcome.failure), (3, None));
}

#[test]
fn a_block_goes_into_the_region_of_the_same_name_whatever_the_ids_are() {
    let mut load = selected(true);
    let batches = load.blocks_announced(3, &all()).unwrap();
    let regions = |batch: &ReadBatch| (batch.remote_region(), batch.region);
    let regions: Vec<_> = batches.iter().map(regions).collect();
    assert_eq!(regions, [(21, 10), (20, 11)]);
}

#[test]
fn a_block_of_a_region_that_was_not_there_at_select_is_not_read_nor_are_those_beside_it() {
    let mut load = selected(true);
    for region in [0, 1, 10, 11, 19, 22] {
        let unknown = ReadyBlock {
            region,
            ..block(0, 2)
        };
        assert_eq!(
            load.blocks_announced(3, &[block(0, 3), unknown]),
            Err(Unreadable::Region(region))
        );
        assert!(!load.is_reading());
    }
}

#[test]
fn a_closed_region_is_lacked_as_long_as_some_of_its_blocks_are_not_verified() {
    let mut load = selected(false);
    let batches = load.blocks_announced(3, &all()).unwrap();
    let has_closed_first = |id: &RegionId| *id != THEIRS[0];
    assert_eq!(load.lacked_region(|_| true), None);
    assert_eq!(load.lacked_region(has_closed_first), Some(OURS[0]));
    load.read_completed(&batches[0], &[true, true], 10);
    assert_eq!(load.lacked_region(has_closed_first), None);
    assert_eq!(load.lacked_region(|_| false), Some(OURS[1]));
}

#[test]
fn a_block_announced_twice_is_read_once() {
    let mut load = selected(true);
    load.blocks_announced(3, &all()).unwrap();
    assert_eq!(load.blocks_announced(3, &[block(0, 2)]).unwrap(), []);
}

#[test]
fn a_block_announced_twice_in_one_region_does_not_stand_for_another_region() {
    let mut load = selected(true);
    let twice = [block(0, 2), block(0, 2), block(0, 3), block(0, 3)];
    for batch in load.blocks_announced(3, &twice).unwrap() {
        let verified = vec![true; batch.blocks.len()];
        load.read_completed(&batch, &verified, 10);
    }
    assert_eq!(load.outcome(), None);
}

#[test]
fn an_empty_load_ends_only_after_its_selection() {
    let mut load = Load::new(request(0, vec![], true), [vec![10]], 2);
    assert_eq!(load.outcome(), None);
    load.select(&THEIRS[..1]);
    assert_eq!(load.outcome().unwrap().failure, None);
}

/// A load of two groups: positions 2 and 3 in our first region, 0 to 2 in the second.
fn of_two_groups() -> Load {
    let request = LoadRequest {
        parts: vec![
            LoadPart::of_all_regions(2, vec![50, 51]),
            LoadPart::of_all_regions(0, vec![60, 61, 62]),
        ],
        ..request(0, vec![], true)
    };
    let mut load = Load::new(request, OURS.map(|region| vec![region]), 2);
    let selected = [part(2, 4, &THEIRS[..1]), part(0, 3, &THEIRS[1..])];
    assert_eq!(load.select(&THEIRS), selected);
    load
}

#[test]
fn each_group_has_positions_and_blocks_of_its_own() {
    let mut load = of_two_groups();
    let blocks = [block(0, 0), block(0, 3), block(1, 0), block(1, 3)];
    let batches = load.blocks_announced(3, &blocks).unwrap();
    let wanted = |batch: &ReadBatch| (batch.region, batch.local_ids.clone());
    let wanted: Vec<_> = batches.iter().map(wanted).collect();
    assert_eq!(wanted, [(OURS[0], vec![51]), (OURS[1], vec![60])]);
    for batch in &batches {
        load.read_completed(batch, &[true], 10);
    }
    load.fail(FailureCause::Other, "cut");
    let outcome = load.outcome().unwrap();
    assert_eq!(outcome.failure, Some(failure(&[0, 3, 4], "cut")));
    assert_eq!(outcome.counts.num_received, 2);
}

#[test]
fn a_load_of_several_groups_is_complete_when_all_of_them_are() {
    let mut load = of_two_groups();
    for blocks in [&[block(0, 2), block(0, 3)][..], &[block(1, 0), block(1, 1)]] {
        for batch in load.blocks_announced(3, blocks).unwrap() {
            load.read_completed(&batch, &[true, true], 10);
        }
    }
    assert_eq!(load.outcome(), None);
    for batch in load.blocks_announced(3, &[block(1, 2)]).unwrap() {
        load.read_completed(&batch, &[true], 10);
    }
    let outcome = load.outcome().unwrap();
    assert_eq!((outcome.counts.num_received, outcome.failure), (5, None));
}

#[test]
fn a_lost_block_of_one_group_ends_the_reads_of_all() {
    let mut load = of_two_groups();
    let batches = load.blocks_announced(3, &[block(0, 3)]).unwrap();
    corrupt(&mut load, &batches);
    let retries = load.next_retries();
    corrupt(&mut load, &retries);
    assert_eq!(load.blocks_announced(3, &[block(1, 0)]).unwrap(), []);
    let failure = load.outcome().unwrap().failure.unwrap();
    assert_eq!(failure.missing, [0, 1, 2, 3, 4]);
}
