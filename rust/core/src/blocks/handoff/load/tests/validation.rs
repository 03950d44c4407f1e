//! Loads of blocks without checksums.

use super::*;

/// The same blocks from a producer that validates.
fn without_checksums(blocks: Vec<ReadyBlock>) -> Vec<ReadyBlock> {
    let without = |block| ReadyBlock {
        checksum: None,
        ..block
    };
    blocks.into_iter().map(without).collect()
}

fn validating(is_committed: bool) -> Load {
    let mut load = selected(is_committed);
    for batch in load.blocks_announced(3, &without_checksums(all())).unwrap() {
        assert_eq!(load.epoch_to_validate(), None, "a read has not ended");
        load.read_completed(&batch, &[true, true], 10);
    }
    assert_eq!(load.epoch_to_validate(), Some(3));
    load
}

#[test]
fn blocks_without_checksums_count_when_the_grant_still_holds_after_the_last_read() {
    for is_committed in [false, true] {
        let mut load = validating(is_committed);
        assert_eq!((load.next_verified(), load.outcome()), (None, None));
        load.validation_asked(70);
        assert_eq!(load.epoch_to_validate(), None, "it asks once");
        assert!(!load.validation_answered(69, true), "of another load");
        assert_eq!((load.next_verified(), load.outcome()), (None, None));
        assert!(load.validation_answered(70, true));
        let counts = load.next_verified().unwrap();
        let expected = (4, 0, 2);
        let found = (
            counts.num_validated,
            counts.num_compared,
            counts.num_received,
        );
        assert_eq!(found, expected);
        assert_eq!(load.outcome().is_some(), is_committed);
        assert!(!load.validation_answered(70, false), "it was answered");
    }
}

#[test]
fn no_block_counts_when_the_grant_does_not_hold() {
    let mut load = validating(true);
    load.validation_asked(70);
    assert!(load.validation_answered(70, false));
    load.fail(FailureCause::Other, "ended");
    assert_eq!(
        load.outcome().unwrap().failure,
        Some(failure(&[0, 1], "ended"))
    );
}

#[test]
fn blocks_whose_grant_did_not_hold_or_is_not_known_are_not_counted_as_validated() {
    for is_answered in [true, false] {
        let mut load = validating(true);
        load.validation_asked(70);
        load.fail(FailureCause::Other, "late");
        if is_answered {
            load.validation_answered(70, false);
        } else {
            load.cannot_validate();
        }
        assert_eq!(load.outcome().unwrap().counts.num_validated, 0);
    }
}

#[test]
fn a_load_that_fails_in_part_asks_for_the_blocks_that_are_here() {
    for is_valid in [true, false] {
        let mut load = selected(true);
        let blocks = without_checksums(all());
        let batches = load.blocks_announced(3, &blocks).unwrap();
        // The second block does not come in the second region.
        load.read_completed(&batches[0], &[true, true], 10);
        load.read_completed(&batches[1], &[true, false], 10);
        assert_eq!(load.epoch_to_validate(), None, "it is read again");
        for batch in load.next_retries() {
            load.read_failed(&batch, "refused");
        }
        assert_eq!((load.outcome(), load.epoch_to_validate()), (None, Some(3)));
        load.validation_asked(70);
        load.validation_answered(70, is_valid);
        let missing: &[u32] = if is_valid { &[1] } else { &[0, 1] };
        if !is_valid {
            load.fail(FailureCause::Other, "ended");
        }
        let outcome = load.outcome().unwrap();
        assert_eq!(outcome.failure.unwrap().missing, missing);
    }
}

#[test]
fn a_cancelled_load_asks_when_its_last_read_has_ended() {
    let mut load = selected(false);
    let blocks = without_checksums(all());
    let batches = load.blocks_announced(3, &blocks).unwrap();
    load.read_completed(&batches[0], &[true, true], 10);
    load.fail(FailureCause::Other, "late");
    assert_eq!(load.epoch_to_validate(), None);
    load.read_completed(&batches[1], &[true, true], 10);
    assert_eq!((load.outcome(), load.epoch_to_validate()), (None, Some(3)));
    load.validation_asked(70);
    assert!(load.awaits_validation());
    load.cannot_validate();
    assert_eq!(
        load.outcome().unwrap().failure,
        Some(failure(&[0, 1], "late"))
    );
}

#[test]
fn a_question_whose_session_is_lost_is_asked_again() {
    let mut load = validating(true);
    load.validation_asked(70);
    load.session_lost();
    assert_eq!(load.epoch_to_validate(), Some(3));
    assert!(!load.validation_answered(70, true), "of the lost session");
    load.validation_asked(71);
    assert!(load.validation_answered(71, true));
    assert_eq!(load.outcome().unwrap().failure, None);
    load.session_lost();
    assert_eq!(load.epoch_to_validate(), None);
}

#[test]
fn blocks_with_checksums_need_no_answer() {
    let mut load = selected(true);
    read_all(&mut load);
    assert_eq!(load.epoch_to_validate(), None);
    load.cannot_validate();
    assert_eq!(load.outcome().unwrap().failure, None);
}
