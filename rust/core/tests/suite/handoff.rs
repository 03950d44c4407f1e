//! Handoffs between two agents, over every data path: proved, or failed with exactly what is missing.

use std::ops::Range;
use std::time::Instant;

use kvpipe_core::Error;
use kvpipe_core::blocks::Region;
use kvpipe_core::blocks::handoff::{Event, LoadPart, LoadRequest};
use kvpipe_ucx::Buffer;

use crate::common::{
    self, PROMPT, Process, TIMEOUT, eventually, on_both_paths, on_every_path, say,
};
use crate::workers::{BLOCK, COUNT, ID, LAYERS, pair, step, worker};

#[test]
fn peer_process() {
    let Some((role, argument, mut parent)) = common::role() else {
        return;
    };
    let search = common::ucx().expect("the parent found UCX").into();
    match role.as_str() {
        "producer" => {
            let producer = worker(&search, 100);
            producer.mark_ready(0, &[4, 5, 6, 7]);
            let address = producer.agent.address().expect("address");
            say(&mut parent, &address.to_string());
            say(&mut parent, &format!("{:?}", producer.agent.incarnation()));
            common::wait_for_the_end(parent);
        }
        "consumer" => {
            let consumer = worker(&search, 900);
            let (address, incarnation) = argument.split_once(' ').expect("two words");
            let mut request = consumer.request(&[0, 1, 2, 3]);
            address.clone_into(&mut request.producer);
            request.incarnation = parse(incarnation);
            consumer.load(request);
            let producer = worker(&search, 100);
            eventually("the first half", || {
                consumer.has(&[0, 1], &producer, &[4, 5]).then_some(())
            });
            say(&mut parent, "half");
            common::wait_for_the_end(parent);
        }
        other => panic!("unknown role {other}"),
    }
}

fn parse(incarnation: &str) -> [u8; 16] {
    let numbers = incarnation.trim_matches(['[', ']']).split(',');
    let bytes: Vec<u8> = numbers
        .map(|number| number.trim().parse().expect("a byte"))
        .collect();
    bytes.try_into().expect("16 bytes")
}

#[test]
fn a_load_after_the_last_block_is_complete_and_taken_once() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        producer.mark_ready(0, &[4, 9, 5, 31]);
        consumer.load(producer.request(&[1, 2, 3, 20]));
        assert_eq!(consumer.loaded(), (4 * LAYERS * BLOCK) as u64);
        assert!(consumer.has(&[1, 2, 3, 20], &producer, &[4, 9, 5, 31]));
        eventually("the end of the loan", || producer.events().first().cloned());
        eventually("no lease", || {
            (producer.agent.num_leased() == 0).then_some(())
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert_eq!(producer.events(), [Event::Acknowledged { handoff: ID }]);
        assert_eq!(consumer.events().len(), 1);
    });
}

#[test]
fn a_load_before_the_first_block_gets_blocks_as_they_become_final() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let mut request = producer.request(&[10, 11, 12, 13]);
        request.parts[0].first = 2;
        consumer.load(request);
        // The consumer has positions 0 and 1 already, and wants no more than position 5.
        producer.mark_ready(0, &[20, 21, 22]);
        eventually("the first wanted block", || {
            consumer.has(&[10], &producer, &[22]).then_some(())
        });
        assert_eq!(consumer.events(), []);
        producer.mark_ready(3, &[23]);
        producer.mark_ready(4, &[24, 25, 26]);
        assert_eq!(consumer.loaded(), (4 * LAYERS * BLOCK) as u64);
        assert!(consumer.has(&[10, 11, 12, 13], &producer, &[22, 23, 24, 25]));
    });
}

#[test]
fn a_load_ends_only_with_the_sequence_state() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        producer.mark_ready(0, &[4, 5]);
        let mut request = producer.request(&[1, 2]);
        request.is_committed = false;
        consumer.load(request);
        eventually("the blocks", || {
            consumer.has(&[1, 2], &producer, &[4, 5]).then_some(())
        });
        eventually("the blocks are verified", || {
            (!consumer.events().is_empty()).then_some(())
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(matches!(consumer.events()[..], [Event::BlocksVerified(_)]));
        consumer.agent.commit(ID).expect("commit");
        consumer.loaded();
    });
}

#[test]
fn another_life_of_the_producer_is_not_read() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        producer.mark_ready(0, &[4]);
        let mut request = producer.request(&[1]);
        request.incarnation = [1; 16];
        consumer.load(request);
        let (missing, reason) = consumer.failed();
        assert_eq!(missing, [0]);
        assert!(reason.contains("restarted"), "{reason}");
        assert_eq!(producer.agent.num_leased(), 1);
    });
}

#[test]
fn of_a_handoff_that_its_producer_ends_nothing_may_be_used() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        producer.mark_ready(0, &[4, 5]);
        consumer.load(producer.request(&[1, 2, 3]));
        eventually("the first blocks", || {
            consumer.has(&[1, 2], &producer, &[4, 5]).then_some(())
        });
        producer.agent.end(ID, "aborted by the test").expect("end");
        assert_eq!(
            consumer.failed(),
            (vec![0, 1, 2], "aborted by the test".to_owned())
        );
        eventually("its blocks are leased no more", || {
            (producer.agent.num_leased() == 0).then_some(())
        });
        // And for good.
        producer.mark_ready(2, &[6]);
        let again = worker(transport, 900);
        again.load(producer.request(&[1]));
        assert!(again.failed().1.contains("aborted by the test"));
    });
}

#[test]
fn blocks_that_changed_after_they_were_final_are_missing_and_no_others() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        producer.mark_ready(0, &[4, 5, 6]);
        eventually("the checksums", || {
            (producer.agent.num_leased() == 1).then_some(())
        });
        assert!(producer.layers[1].write(5 * BLOCK + 17, b"!"));
        consumer.load(producer.request(&[1, 2, 3]));
        let (missing, reason) = consumer.failed();
        assert_eq!(missing, [1]);
        assert!(
            reason.contains("checksum") && reason.contains("region 1"),
            "{reason}"
        );
        assert_eq!(producer.events(), []);
    });
}

#[test]
fn a_consumer_may_try_again() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        producer.mark_ready(0, &[4, 5]);
        consumer.load(producer.request(&[1, 2, 3]));
        eventually("the first blocks", || {
            consumer.has(&[1, 2], &producer, &[4, 5]).then_some(())
        });
        consumer.settle();
        consumer.agent.cancel(ID, "once", false).expect("cancel");
        assert_eq!(consumer.failed().0, [2]);
        consumer.seen.borrow_mut().clear();
        consumer.load(producer.request(&[21, 22, 23]));
        producer.mark_ready(2, &[6]);
        consumer.loaded();
        assert!(consumer.has(&[21, 22, 23], &producer, &[4, 5, 6]));
        eventually("the end of the loan", || producer.events().first().cloned());
        assert_eq!(producer.events(), [Event::Acknowledged { handoff: ID }]);
    });
}

#[test]
fn two_loads_of_one_handoff_at_once_leave_the_first_alone() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        consumer.load(producer.request(&[1]));
        consumer.load(producer.request(&[2]));
        producer.mark_ready(0, &[4]);
        consumer.loaded();
        assert!(consumer.has(&[1], &producer, &[4]));
        assert_eq!(consumer.events().len(), 1);
    });
}

#[test]
fn regions_that_differ_are_named() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let more = consumer.agent.register("extra", Buffer::zeroed(64), 64, 64);
        more.expect("register")
            .wait_for(TIMEOUT)
            .expect("registered");
        consumer.load(producer.request(&[1]));
        let (missing, reason) = consumer.failed();
        assert_eq!(missing, [0]);
        assert!(reason.contains("4 regions here, 3 there"), "{reason}");
    });
}

#[test]
fn a_block_that_is_not_there_ends_its_handoff() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        producer.mark_ready(0, &[4, COUNT as u32]);
        consumer.load(producer.request(&[1]));
        assert!(consumer.failed().1.contains("block 32"));
    });
}

#[test]
fn an_agent_that_is_closed_reports_its_loads_as_failed() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        producer.mark_ready(0, &[4, 5]);
        consumer.load(producer.request(&[1, 2, 3]));
        eventually("the first blocks", || {
            consumer.has(&[1, 2], &producer, &[4, 5]).then_some(())
        });
        consumer.agent.close();
        let (missing, reason) = consumer.failed();
        assert_eq!(missing.last(), Some(&2));
        assert!(reason.contains("closed"), "{reason}");
    });
}

#[test]
fn a_producer_that_is_closed_fails_the_load() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let request = producer.request(&[1, 2]);
        producer.agent.close();
        consumer.load(request);
        let (missing, reason) = consumer.failed();
        assert_eq!(missing, [0, 1]);
        assert!(reason.contains("cannot reach"), "{reason}");
    });
}

#[test]
fn groups_of_layers_have_positions_and_blocks_of_their_own() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let group = |layers: Range<usize>, first, block_ids: &[u32]| LoadPart {
            regions: Some(consumer.regions[layers].to_vec()),
            first,
            block_ids: block_ids.to_vec(),
        };
        let request = LoadRequest {
            parts: vec![group(0..1, 0, &[1, 2]), group(1..LAYERS, 7, &[3])],
            ..producer.request(&[])
        };
        producer.save(&step(0, &[4, 5]).expect("a step"), 0..1);
        producer.save(&step(6, &[6, 7]).expect("a step"), 1..LAYERS);
        consumer.load(request);
        assert_eq!(consumer.loaded(), (2 + 2) * BLOCK as u64);
        for (layer, ours, theirs) in [(0, 1, 4), (0, 2, 5), (1, 3, 7), (2, 3, 7)] {
            assert_eq!(consumer.block(layer, ours), producer.block(layer, theirs));
        }
    });
}

#[test]
fn a_load_of_some_groups_of_layers_needs_nothing_of_the_others() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let part = LoadPart {
            regions: Some(consumer.regions[..1].to_vec()),
            first: 0,
            block_ids: vec![1],
        };
        producer.save(&step(0, &[4]).expect("a step"), 0..1);
        consumer.load(LoadRequest {
            parts: vec![part],
            ..producer.request(&[])
        });
        assert_eq!(consumer.loaded(), BLOCK as u64);
        assert_eq!(consumer.block(0, 1), producer.block(0, 4));
    });
}

#[test]
fn a_load_whose_parts_share_a_region_or_have_none_is_refused() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let part = |regions: &[Region]| LoadPart {
            regions: Some(regions.to_vec()),
            first: 0,
            block_ids: vec![1],
        };
        let all = &consumer.regions[..];
        for parts in [vec![part(&[])], vec![part(all), part(&all[..1])]] {
            let request = LoadRequest {
                parts,
                ..producer.request(&[])
            };
            assert!(matches!(
                consumer.agent.load(request),
                Err(Error::Config(_))
            ));
        }
    });
}

#[test]
fn positions_beyond_32_bits_are_refused() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        assert!(step(u32::MAX - 1, &[1, 2]).is_err());
        let mut request = producer.request(&[1, 2]);
        request.parts[0].first = u32::MAX - 1;
        assert!(consumer.agent.load(request).is_err());
    });
}

#[test]
fn a_producer_killed_under_a_load_fails_it_with_what_is_missing() {
    on_both_paths(|search| {
        let (twin, consumer) = pair(&search.clone().into());
        let mut producer = Process::start("producer", "");
        let mut request = twin.request(&[0, 1, 2, 3, 4, 5]);
        request.producer = producer.line();
        request.incarnation = parse(&producer.line());
        consumer.load(request);
        eventually("the first blocks", || {
            consumer
                .has(&[0, 1, 2, 3], &twin, &[4, 5, 6, 7])
                .then_some(())
        });
        consumer.settle();
        let killed = Instant::now();
        producer.kill();
        let (missing, reason) = consumer.failed();
        assert!(killed.elapsed() < PROMPT);
        assert_eq!(missing, [4, 5]);
        assert!(reason.contains("lost peer"), "{reason}");
    });
}

#[test]
fn a_consumer_killed_under_its_load_leaves_the_handoff_to_another() {
    on_both_paths(|search| {
        let (producer, other) = pair(&search.clone().into());
        producer.mark_ready(0, &[4, 5]);
        let address = producer.agent.address().expect("address");
        let argument = format!("{address} {:?}", producer.agent.incarnation());
        let mut consumer = Process::start("consumer", &argument);
        assert_eq!(consumer.line(), "half");
        let killed = Instant::now();
        consumer.kill();
        let is_lost = |event: &Event| matches!(event, Event::Log(text) if text.contains("closed"));
        eventually("the loss", || {
            producer.agent.drain().iter().any(is_lost).then_some(())
        });
        assert!(killed.elapsed() < PROMPT);
        assert_eq!(producer.agent.num_leased(), 1);
        other.load(producer.request(&[0, 1, 2, 3]));
        producer.mark_ready(2, &[6, 7]);
        other.loaded();
        assert!(other.has(&[0, 1, 2, 3], &producer, &[4, 5, 6, 7]));
    });
}
