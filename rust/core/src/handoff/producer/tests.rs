use super::*;

const ID: HandoffId = [7; 16];

fn block(position: u32) -> ReadyBlock {
    in_layer(0, position)
}

fn in_layer(region: u16, position: u32) -> ReadyBlock {
    ReadyBlock {
        region,
        position,
        block_id: position + 100,
        checksum: 0,
    }
}

fn select(session: SessionKey, first: u32, end: u32) -> BlockSelection {
    BlockSelection {
        session,
        first,
        end,
    }
}

fn positions(actions: &[ProducerAction]) -> Vec<u32> {
    let of = |action: &ProducerAction| match action {
        ProducerAction::Announce { blocks, .. } => {
            blocks.iter().map(|block| block.position).collect()
        }
        ProducerAction::End { .. } => vec![],
    };
    actions.iter().flat_map(of).collect()
}

fn layers(actions: &[ProducerAction]) -> Vec<u16> {
    let of = |action: &ProducerAction| match action {
        ProducerAction::Announce { blocks, .. } => {
            blocks.iter().map(|block| block.region).collect()
        }
        ProducerAction::End { .. } => vec![],
    };
    actions.iter().flat_map(of).collect()
}

#[test]
fn a_select_gets_what_is_final_and_then_the_rest_as_it_comes() {
    let (mut producer, later) = (Producer::default(), Instant::now() + FIRST_BLOCK_TIMEOUT);
    producer.mark_ready(ID, 0, &[block(0), block(1)]);
    assert_eq!(
        positions(&producer.select(select(20, 1, 3), ID, later)),
        [1]
    );
    assert_eq!(
        positions(&producer.mark_ready(ID, 0, &[block(2), block(3)])),
        [2]
    );
}

#[test]
fn what_becomes_final_at_once_in_several_layers_is_one_announcement() {
    let (mut producer, later) = (Producer::default(), Instant::now() + FIRST_BLOCK_TIMEOUT);
    producer.select(select(20, 0, 2), ID, later);
    let both: Vec<ReadyBlock> = (0..3)
        .flat_map(|region| [in_layer(region, 0), in_layer(region, 1)])
        .collect();
    let actions = producer.mark_ready(ID, 0, &both);
    assert!(
        matches!(&actions[..], [ProducerAction::Announce { blocks, .. }] if *blocks == both),
        "{actions:?}"
    );
}

#[test]
fn who_selects_late_is_told_of_any_number_of_blocks_in_announcements_of_bounded_size() {
    let (mut producer, later) = (Producer::default(), Instant::now() + FIRST_BLOCK_TIMEOUT);
    let end = 2 * ANNOUNCED_CAP as u32 + 1;
    let blocks: Vec<ReadyBlock> = (0..end).map(block).collect();
    producer.select(select(20, 0, end), ID, later);
    let in_time = producer.mark_ready(ID, 0, &blocks);
    let late = producer.select(select(21, 0, end), ID, later);
    let size = |action: &ProducerAction| positions(std::slice::from_ref(action)).len();
    for actions in [in_time, late] {
        let sizes: Vec<usize> = actions.iter().map(size).collect();
        assert_eq!(sizes, [ANNOUNCED_CAP, ANNOUNCED_CAP, 1]);
        assert_eq!(positions(&actions), (0..end).collect::<Vec<_>>());
    }
}

#[test]
fn each_layer_is_told_once_to_who_has_selected_and_all_to_who_comes_later() {
    let (mut producer, later) = (Producer::default(), Instant::now() + FIRST_BLOCK_TIMEOUT);
    producer.mark_ready(ID, 0, &[in_layer(0, 0)]);
    assert_eq!(layers(&producer.select(select(20, 0, 1), ID, later)), [0]);
    assert_eq!(layers(&producer.mark_ready(ID, 0, &[in_layer(1, 0)])), [1]);
    assert_eq!(
        layers(&producer.select(select(21, 0, 1), ID, later)),
        [0, 1]
    );
    let actions = producer.mark_ready(ID, 0, &[in_layer(2, 0)]);
    assert_eq!(layers(&actions), [2, 2]);
}

#[test]
fn a_handoff_that_ends_between_two_layers_is_announced_no_further() {
    let (mut producer, later) = (Producer::default(), Instant::now() + FIRST_BLOCK_TIMEOUT);
    producer.select(select(20, 0, 1), ID, later);
    producer.mark_ready(ID, 0, &[in_layer(0, 0)]);
    producer.end_handoff(ID, "preempted");
    assert_eq!(producer.mark_ready(ID, 0, &[in_layer(1, 0)]), []);
    assert_eq!(layers(&producer.select(select(21, 0, 1), ID, later)), []);
}

#[test]
fn a_select_before_the_handoff_waits_for_it() {
    let (mut producer, later) = (Producer::default(), Instant::now() + FIRST_BLOCK_TIMEOUT);
    assert!(producer.select(select(20, 0, 9), ID, later).is_empty());
    assert_eq!(positions(&producer.mark_ready(ID, 0, &[block(0)])), [0]);
}

#[test]
fn a_select_of_a_handoff_that_never_comes_is_refused_at_its_deadline() {
    let (mut producer, now) = (Producer::default(), Instant::now());
    producer.select(select(20, 0, 9), ID, now + FIRST_BLOCK_TIMEOUT);
    assert_eq!(
        producer.expire(now),
        (vec![], Some(now + FIRST_BLOCK_TIMEOUT))
    );
    let (actions, _) = producer.expire(now + FIRST_BLOCK_TIMEOUT);
    assert!(
        matches!(&actions[..], [ProducerAction::End { session: 20, .. }]),
        "{actions:?}"
    );
}

#[test]
fn a_consumer_that_selects_what_nobody_opens_shuts_out_no_other() {
    let (mut producer, later) = (Producer::default(), Instant::now() + FIRST_BLOCK_TIMEOUT);
    for n in 0..=PENDING_CAP as u128 {
        producer.select(select(20, 0, 1), n.to_le_bytes(), later);
    }
    let told = producer.select(select(21, 0, 1), ID, later);
    assert!(
        matches!(&told[..], [ProducerAction::End { session: 20, .. }]),
        "{told:?}"
    );
    let actions = producer.mark_ready(ID, 0, &[block(0)]);
    assert!(
        matches!(&actions[..], [ProducerAction::Announce { session: 21, .. }]),
        "{actions:?}"
    );
}

#[test]
fn done_counts_once_and_only_from_a_consumer_that_selected() {
    let (mut producer, later) = (Producer::default(), Instant::now() + FIRST_BLOCK_TIMEOUT);
    producer.mark_ready(ID, 0, &[block(0)]);
    assert!(!producer.acknowledge(20, ID));
    producer.select(select(20, 0, 1), ID, later);
    assert!(producer.acknowledge(20, ID));
    assert!(!producer.acknowledge(20, ID));
    assert_eq!(producer.num_leased(), 0);
}

#[test]
fn a_consumer_that_selects_again_is_told_of_each_block_once() {
    let (mut producer, later) = (Producer::default(), Instant::now() + FIRST_BLOCK_TIMEOUT);
    producer.select(select(20, 0, 2), ID, later);
    producer.select(select(20, 0, 2), ID, later);
    assert_eq!(positions(&producer.mark_ready(ID, 0, &[block(0)])), [0]);
    producer.select(select(20, 1, 2), ID, later);
    assert_eq!(positions(&producer.mark_ready(ID, 0, &[block(1)])), [1]);
}

#[test]
fn an_ended_handoff_is_refused_and_never_comes_back() {
    let (mut producer, later) = (Producer::default(), Instant::now() + FIRST_BLOCK_TIMEOUT);
    producer.mark_ready(ID, 0, &[block(0)]);
    producer.select(select(20, 0, 1), ID, later);
    let actions = producer.end_handoff(ID, "aborted");
    assert_eq!(
        actions,
        [ProducerAction::End {
            session: 20,
            handoff: ID,
            reason: "aborted".to_owned()
        }]
    );
    producer.mark_ready(ID, 0, &[block(1)]);
    assert_eq!(producer.num_leased(), 0);
    let actions = producer.select(select(21, 0, 1), ID, later);
    assert!(
        matches!(&actions[..], [ProducerAction::End { session: 21, .. }]),
        "{actions:?}"
    );
}

#[test]
fn a_new_generation_voids_the_blocks_of_the_old() {
    let (mut producer, later) = (Producer::default(), Instant::now() + FIRST_BLOCK_TIMEOUT);
    producer.mark_ready(ID, 0, &[block(0), block(1)]);
    producer.mark_ready(ID, 1, &[block(0)]);
    assert_eq!(
        positions(&producer.select(select(20, 0, 9), ID, later)),
        [0]
    );
}
