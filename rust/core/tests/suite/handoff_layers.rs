//! Handoffs whose layers become final one after the other, over every data path.

use std::time::Duration;

use kvpipe_core::blocks::AgentConfig;
use kvpipe_core::blocks::handoff::{Event, ReadyBlocks, ReadyRange};

use crate::common::{self, eventually, on_every_path};
use crate::workers::{BLOCK, ID, LAYERS, Worker, pair, step, worker, worker_from};

/// Waits until blocks of a layer are where they belong.
fn arrive(consumer: &Worker, layer: usize, to: &[u32], producer: &Worker, from: &[u32]) {
    let same =
        |(&to, &from): (&u32, &u32)| consumer.block(layer, to) == producer.block(layer, from);
    eventually("blocks of a layer", || {
        to.iter().zip(from).all(same).then_some(())
    });
}

#[test]
fn a_layer_is_read_while_the_next_ones_are_computed() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        consumer.load(producer.request(&[1, 2]));
        let ready = step(0, &[4, 5]).expect("a step");
        for layer in 0..LAYERS {
            // The other layers still change: nothing of them may have been summed or read.
            for later in layer..LAYERS {
                let computed = [(layer * LAYERS + later) as u8; 2 * BLOCK];
                assert!(producer.layers[later].write(4 * BLOCK, &computed));
            }
            assert_eq!(consumer.events(), []);
            producer.save(&ready, layer..layer + 1);
            arrive(&consumer, layer, &[1, 2], &producer, &[4, 5]);
        }
        assert_eq!(consumer.loaded(), (2 * LAYERS * BLOCK) as u64);
        assert!(consumer.has(&[1, 2], &producer, &[4, 5]));
    });
}

#[test]
fn layers_announced_before_the_select_are_told_to_it() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let ready = step(0, &[4, 5]).expect("a step");
        producer.save(&ready, 0..1);
        eventually("the first layer", || {
            (producer.agent.num_leased() == 1).then_some(())
        });
        producer.save(&ready, 1..2);
        consumer.load(producer.request(&[1, 2]));
        arrive(&consumer, 0, &[1, 2], &producer, &[4, 5]);
        arrive(&consumer, 1, &[1, 2], &producer, &[4, 5]);
        assert_eq!(consumer.events(), []);
        producer.save(&ready, 2..LAYERS);
        assert_eq!(consumer.loaded(), (2 * LAYERS * BLOCK) as u64);
        assert!(consumer.has(&[1, 2], &producer, &[4, 5]));
    });
}

#[test]
fn a_producer_waits_for_the_first_block_as_long_as_its_consumer_says() {
    on_every_path(|transport| {
        let listen = common::local();
        let config = AgentConfig {
            first_block_timeout: Duration::from_millis(50),
            ..AgentConfig::new(&listen, common::TOKEN, transport.clone())
        };
        let (producer, consumer) = (worker(transport, 1), worker_from(config, 20, BLOCK));
        consumer.load(producer.request(&[1]));
        let reason = eventually("the end of the load", || match &consumer.events()[..] {
            [Event::LoadFailed(_, failure)] => Some(failure.reason.clone()),
            _ => None,
        });
        assert!(reason.contains("not known here"), "{reason}");
    });
}

#[test]
fn a_handoff_that_ends_between_two_layers_is_announced_no_further() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let before = consumer.block(1, 1);
        consumer.load(producer.request(&[1, 2]));
        let ready = step(0, &[4, 5]).expect("a step");
        producer.save(&ready, 0..1);
        arrive(&consumer, 0, &[1, 2], &producer, &[4, 5]);
        producer
            .agent
            .end(ID, "withdrawn by the test")
            .expect("end");
        producer.save(&ready, 1..LAYERS);
        let expected = (vec![0, 1], "withdrawn by the test".to_owned());
        assert_eq!(consumer.failed(), expected);
        let again = worker(transport, 900);
        let untouched = again.block(0, 1);
        again.load(producer.request(&[1]));
        assert!(again.failed().1.contains("withdrawn by the test"));
        assert_eq!(consumer.block(1, 1), before);
        assert_eq!(again.block(0, 1), untouched);
        assert_eq!(producer.agent.num_leased(), 0);
    });
}

#[test]
fn handoffs_of_one_step_end_each_by_itself() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let other = [8; 16];
        let part = |handoff, block_ids: &[u32]| ReadyRange {
            handoff,
            first: 0,
            block_ids: block_ids.to_vec(),
        };
        let ready =
            ReadyBlocks::new(vec![part(other, &[6, 7]), part(ID, &[4, 5])]).expect("a step");
        producer.save(&ready, 0..1);
        producer.agent.end(other, "aborted").expect("end");
        producer.save(&ready, 1..LAYERS);
        consumer.load(producer.request(&[1, 2]));
        consumer.loaded();
        assert!(consumer.has(&[1, 2], &producer, &[4, 5]));
    });
}

#[test]
fn steps_whose_layers_come_one_by_one_follow_each_other() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        consumer.load(producer.request(&[1, 2, 3]));
        for (first, block_ids) in [(0, &[4, 5][..]), (2, &[9])] {
            let ready = step(first, block_ids).expect("a step");
            for layer in 0..LAYERS {
                producer.save(&ready, layer..layer + 1);
            }
        }
        assert_eq!(consumer.loaded(), (3 * LAYERS * BLOCK) as u64);
        assert!(consumer.has(&[1, 2, 3], &producer, &[4, 5, 9]));
        eventually("the end of the loan", || producer.events().first().cloned());
        assert_eq!(producer.events(), [Event::Acknowledged { handoff: ID }]);
    });
}

#[test]
fn regions_that_are_not_the_agents_or_closed_are_refused() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let ready = step(0, &[4]).expect("a step");
        let mark_ready = |regions| producer.agent.mark_ready(&ready, regions);
        assert!(mark_ready(&consumer.regions).is_err());
        let closed = producer.agent.close_region(&producer.regions[2], None);
        closed
            .expect("close")
            .wait_for(common::TIMEOUT)
            .expect("closed");
        assert!(mark_ready(&producer.regions).is_err());
        assert_eq!(producer.agent.num_leased(), 0);
    });
}
