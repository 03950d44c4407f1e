use super::*;
use crate::ids::RegionId;
use std::time::Duration;

const ID: HandoffId = [7; 16];
const LAYERS: RegionId = 4;
const FIRST_BLOCK_TIMEOUT: Duration = Duration::from_secs(300);

fn block(position: u32) -> ReadyBlock {
    in_layer(0, position)
}

fn in_layer(region: RegionId, position: u32) -> ReadyBlock {
    ReadyBlock {
        region,
        position,
        block_id: position + 100,
        checksum: Some(0),
    }
}

/// Positions selected at a producer of [`LAYERS`] regions.
fn selected(parts: &[SelectedPart]) -> SelectedPositions {
    SelectedPositions::of(parts, |region| *region < LAYERS)
}

fn selection(session: SessionKey, first: u32, end: u32, now: Instant) -> BlockSelection {
    let regions = (0..LAYERS).collect();
    BlockSelection {
        session,
        handoff: ID,
        positions: selected(&[SelectedPart {
            first,
            end,
            regions,
        }]),
        deadline: now + FIRST_BLOCK_TIMEOUT,
    }
}

fn announced(messages: &[Outgoing]) -> Vec<ReadyBlock> {
    let of = |outgoing: &Outgoing| match &outgoing.message {
        HandoffMessage::BlocksReady { blocks, .. } => blocks.clone(),
        _ => vec![],
    };
    messages.iter().flat_map(of).collect()
}

fn positions(messages: &[Outgoing]) -> Vec<u32> {
    let blocks = announced(messages);
    blocks.iter().map(|block| block.position).collect()
}

fn layers(messages: &[Outgoing]) -> Vec<RegionId> {
    let blocks = announced(messages);
    blocks.iter().map(|block| block.region).collect()
}

/// The consumer to which the only message goes, if that is the end of a handoff.
fn refused(messages: &[Outgoing]) -> Option<SessionKey> {
    match messages {
        [one] if matches!(one.message, HandoffMessage::Ended { .. }) => Some(one.session),
        _ => None,
    }
}

#[test]
fn a_selection_is_announced_ready_blocks_at_once_and_the_rest_as_they_become_ready() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    producer.mark_ready(ID, &[block(0), block(1)]);
    assert_eq!(positions(&producer.select(selection(20, 1, 3, now))), [1]);
    assert_eq!(
        positions(&producer.mark_ready(ID, &[block(2), block(3)])),
        [2]
    );
}

#[test]
fn blocks_marked_ready_together_in_several_layers_are_one_announcement() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    producer.select(selection(20, 0, 2, now));
    let both: Vec<ReadyBlock> = (0..3)
        .flat_map(|region| [in_layer(region, 0), in_layer(region, 1)])
        .collect();
    let messages = producer.mark_ready(ID, &both);
    assert_eq!(messages.len(), 1);
    assert_eq!(announced(&messages), both);
}

#[test]
fn a_late_selection_gets_any_number_of_blocks_in_announcements_of_bounded_size() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    let end = 2 * ANNOUNCED_CAP as u32 + 1;
    let blocks: Vec<ReadyBlock> = (0..end).map(block).collect();
    producer.select(selection(20, 0, end, now));
    let in_time = producer.mark_ready(ID, &blocks);
    let late = producer.select(selection(21, 0, end, now));
    let size = |outgoing: &Outgoing| positions(std::slice::from_ref(outgoing)).len();
    for messages in [in_time, late] {
        let sizes: Vec<usize> = messages.iter().map(size).collect();
        assert_eq!(sizes, [ANNOUNCED_CAP, ANNOUNCED_CAP, 1]);
        assert_eq!(positions(&messages), (0..end).collect::<Vec<_>>());
    }
}

#[test]
fn each_layer_is_announced_once_to_earlier_selections_and_all_layers_to_later_ones() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    producer.mark_ready(ID, &[in_layer(0, 0)]);
    assert_eq!(layers(&producer.select(selection(20, 0, 1, now))), [0]);
    assert_eq!(layers(&producer.mark_ready(ID, &[in_layer(1, 0)])), [1]);
    assert_eq!(layers(&producer.select(selection(21, 0, 1, now))), [0, 1]);
    let messages = producer.mark_ready(ID, &[in_layer(2, 0)]);
    assert_eq!(layers(&messages), [2, 2]);
}

#[test]
fn a_handoff_that_ends_between_two_layers_is_announced_no_further() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    producer.select(selection(20, 0, 1, now));
    producer.mark_ready(ID, &[in_layer(0, 0)]);
    producer.end_handoff(ID, "preempted");
    assert_eq!(producer.mark_ready(ID, &[in_layer(1, 0)]), []);
    assert_eq!(layers(&producer.select(selection(21, 0, 1, now))), []);
}

#[test]
fn a_selection_of_an_unknown_handoff_waits_for_its_first_block() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    assert!(producer.select(selection(20, 0, 9, now)).is_empty());
    assert_eq!(positions(&producer.mark_ready(ID, &[block(0)])), [0]);
}

#[test]
fn of_regions_that_are_not_there_nothing_is_kept() {
    let part = SelectedPart {
        first: 0,
        end: 9,
        regions: vec![1, LAYERS, LAYERS + 1],
    };
    assert_eq!(selected(&[part]).0.len(), 1);
}

#[test]
fn a_selection_without_a_first_block_is_refused_at_its_deadline() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    producer.select(selection(20, 0, 9, now));
    assert_eq!(producer.expire(now), []);
    assert_eq!(producer.next_deadline(), Some(now + FIRST_BLOCK_TIMEOUT));
    let messages = producer.expire(now + FIRST_BLOCK_TIMEOUT);
    assert_eq!(refused(&messages), Some(20), "{messages:?}");
}

#[test]
fn selections_of_unknown_handoffs_do_not_shut_out_another_consumer() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    for n in 0..=PENDING_CAP as u128 {
        let handoff = n.to_le_bytes();
        let random = BlockSelection {
            handoff,
            ..selection(20, 0, 1, now)
        };
        producer.select(random);
    }
    let messages = producer.select(selection(21, 0, 1, now));
    assert_eq!(refused(&messages), Some(20), "{messages:?}");
    let messages = producer.mark_ready(ID, &[block(0)]);
    assert_eq!(
        (messages.len(), messages[0].session),
        (1, 21),
        "{messages:?}"
    );
    assert_eq!(positions(&messages), [0]);
}

#[test]
fn an_acknowledgement_counts_once_and_only_from_a_consumer_that_selected() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    producer.mark_ready(ID, &[block(0)]);
    assert_eq!(producer.acknowledge(20, ID), None);
    producer.select(selection(20, 0, 1, now));
    assert_eq!(producer.acknowledge(20, ID), Some(Vec::new()));
    assert_eq!(producer.acknowledge(20, ID), None);
    assert_eq!(producer.num_leased(), 0);
}

#[test]
fn an_acknowledgement_ends_the_handoff_for_the_other_consumers() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    producer.mark_ready(ID, &[block(0)]);
    for session in [20, 21] {
        producer.select(selection(session, 0, 1, now));
    }
    let messages = producer.acknowledge(20, ID).unwrap();
    assert_eq!(refused(&messages), Some(21), "{messages:?}");
}

#[test]
fn a_consumer_that_selects_again_gets_each_block_once() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    producer.select(selection(20, 0, 2, now));
    producer.select(selection(20, 0, 2, now));
    assert_eq!(positions(&producer.mark_ready(ID, &[block(0)])), [0]);
    producer.select(selection(20, 1, 2, now));
    assert_eq!(positions(&producer.mark_ready(ID, &[block(1)])), [1]);
}

#[test]
fn an_ended_handoff_is_refused_and_never_comes_back() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    producer.mark_ready(ID, &[block(0)]);
    producer.select(selection(20, 0, 1, now));
    let messages = producer.end_handoff(ID, "aborted");
    assert_eq!(
        messages,
        [Outgoing {
            session: 20,
            handoff: ID,
            message: HandoffMessage::Ended {
                reason: "aborted".to_owned()
            }
        }]
    );
    producer.mark_ready(ID, &[block(1)]);
    assert_eq!(producer.num_leased(), 0);
    let messages = producer.select(selection(21, 0, 1, now));
    assert_eq!(refused(&messages), Some(21), "{messages:?}");
}

#[test]
fn a_handoff_has_one_epoch_until_it_ends_and_another_when_it_is_ready_again() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    let epoch = |messages: &[Outgoing]| match messages {
        [Outgoing { message, .. }] => match message {
            HandoffMessage::BlocksReady { epoch, .. } => *epoch,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    };
    producer.mark_ready([8; 16], &[block(0)]);
    producer.select(selection(20, 0, 9, now));
    let expected = producer.epoch(&ID);
    let first = epoch(&producer.mark_ready(ID, &[block(0)]));
    assert_eq!((first, producer.epoch(&ID)), (expected, first));
    assert_ne!(first, producer.epoch(&[8; 16]));
    assert_eq!(epoch(&producer.mark_ready(ID, &[block(1)])), first);
    assert_eq!(epoch(&producer.select(selection(21, 0, 9, now))), first);
    producer.end_handoff(ID, "preempted");
    // Its id is used again when the end has been forgotten.
    for n in 0..1_u128 << 13 {
        producer.end_handoff((1 << 64 | n).to_le_bytes(), "others");
    }
    producer.select(selection(20, 0, 9, now));
    assert_ne!(epoch(&producer.mark_ready(ID, &[block(0)])), first);
}

#[test]
fn a_grant_holds_in_its_epoch_until_it_is_ended_or_acknowledged() {
    for is_acknowledged in [false, true] {
        let (mut producer, now) = (Producer::default(), Instant::now());
        let epoch = producer.epoch(&ID);
        assert!(!producer.is_granted(&ID, epoch), "nothing is ready");
        producer.select(selection(20, 0, 1, now));
        assert!(!producer.is_granted(&ID, epoch), "nothing is ready");
        producer.mark_ready(ID, &[block(0)]);
        assert!(producer.is_granted(&ID, epoch));
        assert!(!producer.is_granted(&ID, epoch + 1));
        assert!(!producer.is_granted(&[8; 16], epoch));
        assert_eq!(producer.granted().collect::<Vec<_>>(), [(&ID, epoch)]);
        if is_acknowledged {
            assert!(producer.acknowledge(20, ID).is_some());
        } else {
            producer.end_handoff(ID, "preempted");
        }
        assert!(!producer.is_granted(&ID, epoch));
        assert_eq!(producer.granted().next(), None);
        producer.mark_ready(ID, &[block(0)]);
        assert!(!producer.is_granted(&ID, epoch), "it never comes back");
    }
}

#[test]
fn a_lost_session_gets_no_more_announcements_and_the_others_do() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    for session in [20, 21] {
        producer.select(selection(session, 0, 9, now));
    }
    producer.mark_ready(ID, &[block(0)]);
    producer.select(selection(22, 1, 9, now));
    for session in [20, 22] {
        producer.session_down(session);
    }
    let messages = producer.mark_ready(ID, &[block(1)]);
    let sessions: Vec<_> = messages.iter().map(|one| one.session).collect();
    assert_eq!(sessions, [21]);
    assert!(producer.acknowledge(21, ID).is_some());
    assert_eq!(producer.selected.len(), 0);
}

#[test]
fn a_selection_has_positions_of_its_own_in_each_group_of_layers_and_nothing_in_others() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    let blocks: Vec<ReadyBlock> = (0..3)
        .flat_map(|layer| (0..3).map(move |position| in_layer(layer, position)))
        .collect();
    producer.mark_ready(ID, &blocks);
    let part = |first, end, layer| SelectedPart {
        first,
        end,
        regions: vec![layer],
    };
    let selection = BlockSelection {
        positions: selected(&[part(0, 1, 0), part(2, 9, 2)]),
        ..selection(20, 0, 0, now)
    };
    let messages = producer.select(selection);
    assert_eq!(announced(&messages), [in_layer(0, 0), in_layer(2, 2)]);
}
