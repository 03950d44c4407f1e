//! Notifications between two agents, over every data path.

use std::collections::HashSet;

use kvpipe_core::Error;
use kvpipe_core::blocks::Agent;
use kvpipe_core::blocks::TAG_CAP;
use kvpipe_core::net::codec::Writer;
use kvpipe_core::net::identity::SessionKind;
use kvpipe_ucx::{Buffer, Search};

use crate::agents::{BLOCK, COUNT, agent, pair, register, tagged, tags};
use crate::common::{self, Raw, TIMEOUT, bytes, eventually, on_every_path, pattern};

const READ: u8 = 32;
const REFUSED: u8 = 35;
const NOTIFY: u8 = 40;
const VOID: u8 = 41;
const NOTED: u8 = 42;

fn numbered(numbers: std::ops::Range<u32>) -> Vec<Vec<u8>> {
    numbers.map(|n| n.to_le_bytes().to_vec()).collect()
}

#[test]
fn tags_arrive_in_the_order_of_the_calls_each_once() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        // Written blocks are not read at the same time: such a read is detected.
        let read: Vec<u32> = (0..COUNT as u32 / 2).collect();
        let mut works = Vec::new();
        let mut notified = Vec::new();
        for (tag, n) in numbered(0..900).into_iter().zip(0u32..) {
            match n % 3 {
                0 => notified.push(pair.destination.notify(&pair.peer, tag).expect("notify")),
                1 => works.push(pair.begin_read(&read, &read, tagged(&tag)).expect("read")),
                _ => {
                    let written = [COUNT as u32 / 2 + n % 32];
                    let work = pair.begin_write(&written, &written, tagged(&tag));
                    works.push(work.expect("write"));
                }
            }
        }
        assert_eq!(tags(&pair.source, 900), numbered(0..900));
        for work in works {
            work.wait_for(TIMEOUT).expect("moved");
        }
        for work in notified {
            assert_eq!(work.wait_for(TIMEOUT), Ok(()));
        }
        assert!(pair.source.notifications().expect("open").is_empty());
    });
}

#[test]
fn the_blocks_of_a_transfer_are_there_before_its_tag() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        for round in 0..100u32 {
            let content = pattern(BLOCK, round.into());
            pair.to.write(3 * BLOCK, &content);
            pair.begin_write(&[3], &[4], tagged(b"written"))
                .expect("write");
            assert_eq!(tags(&pair.source, 1), [b"written"]);
            assert!(
                bytes(&pair.from)[4 * BLOCK..5 * BLOCK] == content,
                "{round}"
            );
        }
    });
}

#[test]
fn a_notification_names_its_peer_and_can_be_answered() {
    let Some(search) = common::ucx() else { return };
    let pair = pair(&search, BLOCK, BLOCK);
    pair.destination
        .notify(&pair.peer, b"ping".to_vec())
        .expect("notify");
    let come = eventually("the tag", || {
        let mut come = pair.source.notifications().expect("open");
        come.pop()
    });
    assert_eq!(come.peer.incarnation(), pair.destination.incarnation());
    let accepted = eventually("its regions", || pair.source.peers().pop());
    assert_eq!(come.peer.session(), accepted.session());
    pair.source
        .notify(&come.peer, b"pong".to_vec())
        .expect("notify");
    assert_eq!(tags(&pair.destination, 1), [b"pong"]);
}

#[test]
fn a_failed_transfer_sends_no_tag_and_holds_up_no_other() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        let all: Vec<u32> = (0..COUNT as u32).collect();
        let begin = |n: u32| {
            let options = tagged(&n.to_le_bytes());
            let begun = if n.is_multiple_of(2) {
                pair.begin_read(&all, &all, options)
            } else {
                pair.begin_write(&all, &all, options)
            };
            begun.ok()
        };
        let works: Vec<_> = (0..100).map(begin).collect();
        let closing = pair
            .source
            .close_region(&pair.source_region, None)
            .expect("close");
        let is_moved = |work: &Option<kvpipe_core::work::Work<u64>>| {
            let outcome = work.as_ref().map(|work| work.wait_for(TIMEOUT));
            // Both ways at once, the blocks of one may change under another.
            assert!(
                matches!(
                    outcome,
                    None | Some(Ok(_) | Err(Error::Config(_) | Error::Corrupt(_)))
                ),
                "{outcome:?}"
            );
            matches!(outcome, Some(Ok(_)))
        };
        let moved: Vec<u32> = (0..100).filter(|n| is_moved(&works[*n as usize])).collect();
        assert_eq!(closing.wait_for(TIMEOUT), Ok(()));
        pair.destination
            .notify(&pair.peer, b"end".to_vec())
            .expect("notify");
        let mut expected: Vec<Vec<u8>> = moved.iter().map(|n| n.to_le_bytes().to_vec()).collect();
        expected.push(b"end".to_vec());
        assert_eq!(tags(&pair.source, expected.len()), expected);
    });
}

#[test]
fn a_sender_waits_while_its_notifications_are_not_drained() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        let notify = |tag| pair.destination.notify(&pair.peer, tag).expect("notify");
        let works: Vec<_> = numbered(0..600).into_iter().map(notify).collect();
        assert_eq!(works[255].wait_for(TIMEOUT), Ok(()));
        assert!(
            works[256]
                .wait_for(std::time::Duration::from_millis(100))
                .is_err()
        );
        // Others go on, and what needs no place as well.
        pair.read_and_check(&[1], &[2], (BLOCK, BLOCK));
        let written = pair
            .begin_write(&[1], &[2], tagged(b"later"))
            .expect("write");
        assert!(!written.is_completed());
        let mut expected = numbered(0..600);
        expected.push(b"later".to_vec());
        assert_eq!(tags(&pair.source, 601), expected);
        assert_eq!(works[599].wait_for(TIMEOUT), Ok(()));
        assert_eq!(written.wait_for(TIMEOUT), Ok(BLOCK as u64));
    });
}

#[test]
fn a_tag_of_64_kib_arrives_and_a_longer_one_is_an_error() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        let longest = pattern(TAG_CAP, 1);
        for _ in 0..40 {
            pair.destination
                .notify(&pair.peer, longest.clone())
                .expect("notify");
        }
        assert!(tags(&pair.source, 40).iter().all(|tag| *tag == longest));
        let longer = vec![0; TAG_CAP + 1];
        let error = pair
            .destination
            .notify(&pair.peer, longer.clone())
            .expect_err("too long");
        assert!(
            error.to_string().contains("65537 bytes, at most 65536"),
            "{error}"
        );
        let error = pair
            .begin_read(&[0], &[0], tagged(&longer))
            .expect_err("too long");
        assert!(matches!(error, Error::Config(_)), "{error}");
    });
}

#[test]
fn many_threads_read_and_notify_at_once() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        let pair = &pair;
        std::thread::scope(|scope| {
            for thread in 0..8u32 {
                scope.spawn(move || {
                    for n in 0..100u32 {
                        let tag = (thread << 16 | n).to_le_bytes();
                        pair.destination
                            .notify(&pair.peer, tag.to_vec())
                            .expect("notify");
                        assert_eq!(pair.read(&[thread], &[thread]), Ok(BLOCK as u64));
                    }
                });
            }
            let seen = tags(&pair.source, 800);
            let distinct: HashSet<_> = seen.iter().collect();
            assert_eq!(distinct.len(), 800);
            for thread in 0..8u16 {
                let of_thread: Vec<u16> = seen
                    .iter()
                    .filter(|tag| tag[2..] == thread.to_le_bytes())
                    .map(|tag| u16::from_le_bytes([tag[0], tag[1]]))
                    .collect();
                assert!(of_thread.is_sorted(), "{of_thread:?}");
            }
        });
    });
}

#[test]
fn a_lost_peer_fails_what_it_was_to_be_told() {
    let Some(search) = common::ucx() else { return };
    let pair = pair(&search, BLOCK, BLOCK);
    let notify = || pair.destination.notify(&pair.peer, b"tag".to_vec());
    let works: Vec<_> = (0..400).map(|_| notify().expect("notify")).collect();
    works[255].wait_for(TIMEOUT).expect("in its queue");
    pair.source.close();
    let error = works[399].wait_for(TIMEOUT).expect_err("ended");
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    assert!(matches!(notify(), Err(Error::PeerLost { .. })));
    // Notifications that had arrived can still be drained.
    assert_eq!(pair.source.notifications().expect("the queue").len(), 256);
    assert!(matches!(pair.source.notifications(), Err(Error::Closed(_))));
}

// --- a peer that keeps to no rules

fn raw(search: &Search) -> (Raw, Agent) {
    let agent = agent(search);
    register(&agent, "kv", &Buffer::zeroed(BLOCK), BLOCK, BLOCK);
    let address = agent.address().expect("address");
    (Raw::connect(address, SessionKind::Agent), agent)
}

fn send(raw: &Raw, kind: u8, number: u64, tag: &[u8]) {
    raw.send(&Writer::new(kind).u64(number).finish(), tag);
}

#[test]
fn a_flood_is_cut_off_and_what_was_allowed_of_it_is_kept() {
    let Some(search) = common::ucx() else { return };
    let (mut raw, agent) = raw(&search);
    for number in 0..1000 {
        send(&raw, NOTIFY, number, b"flood");
    }
    assert!(raw.is_closed());
    assert_eq!(agent.notifications().expect("open").len(), 256);
}

#[test]
fn peers_that_come_again_fill_an_inbox_to_its_cap_and_what_was_acknowledged_is_kept() {
    let Some(search) = common::ucx() else { return };
    let (_, agent) = raw(&search);
    let address = agent.address().expect("address");
    let send_window = |raw: &Raw| {
        for number in 0..16 {
            send(raw, NOTIFY, number, &vec![0; TAG_CAP]);
        }
    };
    let wait_for_queued = |raw: &Raw| {
        eventually("all are queued", || {
            let (noted, _) = raw.message(NOTED);
            noted.starts_with(&16u64.to_le_bytes()).then_some(())
        });
    };
    for _ in 0..64 {
        let raw = Raw::connect(address, SessionKind::Agent);
        send_window(&raw);
        wait_for_queued(&raw);
    }
    let first = Raw::connect(address, SessionKind::Agent);
    send_window(&first);
    // Answered, so that all before it has been seen.
    let read = Writer::new(READ).u64(0).u64(9).u8(0).finish();
    first.send(&read, &0u32.to_le_bytes());
    first.message(REFUSED);
    assert_eq!(agent.notifications().expect("open").len(), 64 * 16);
    wait_for_queued(&first);
    assert_eq!(agent.notifications().expect("open").len(), 16);
}

#[test]
fn a_flood_of_bytes_is_cut_off() {
    let Some(search) = common::ucx() else { return };
    let (mut raw, agent) = raw(&search);
    for number in 0..100 {
        send(&raw, NOTIFY, number, &vec![0; TAG_CAP]);
    }
    assert!(raw.is_closed());
    assert_eq!(agent.notifications().expect("open").len(), 16);
}

#[test]
fn numbers_and_acknowledgements_that_cannot_be_are_cut_off() {
    let Some(search) = common::ucx() else { return };
    let twice: &[(u8, u64)] = &[(NOTIFY, 0), (NOTIFY, 0)];
    for messages in [
        twice,
        &[(NOTIFY, 5), (VOID, 5)],
        &[(VOID, u64::MAX)],
        &[(NOTIFY, 256)],
    ] {
        let (mut raw, agent) = raw(&search);
        for (kind, number) in messages {
            send(&raw, *kind, *number, b"");
        }
        assert!(raw.is_closed(), "{messages:?}");
        assert!(agent.notifications().expect("open").len() < 2);
    }
    for (queued, taken) in [(1, 0), (0, 1), (u64::MAX, u64::MAX)] {
        let (mut raw, _agent) = raw(&search);
        raw.send(&Writer::new(NOTED).u64(queued).u64(taken).finish(), b"");
        assert!(raw.is_closed(), "{queued} {taken}");
    }
}

#[test]
fn what_a_peer_says_is_acknowledged_and_credited_when_it_was_taken() {
    let Some(search) = common::ucx() else { return };
    let (raw, agent) = raw(&search);
    send(&raw, NOTIFY, 1, b"b");
    send(&raw, NOTIFY, 0, b"a");
    let noted = |queued: u64, taken: u64| [queued.to_le_bytes(), taken.to_le_bytes()].concat();
    eventually("both are queued", || {
        (raw.message(NOTED).0 == noted(2, 0)).then_some(())
    });
    assert_eq!(tags(&agent, 2), [b"a", b"b"]);
    eventually("both are taken", || {
        (raw.message(NOTED).0 == noted(2, 2)).then_some(())
    });
}
