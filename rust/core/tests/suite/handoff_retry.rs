//! Retries of the lost parts of a load: by a fresh session, or by messages.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvpipe_core::blocks::handoff::Event;
use kvpipe_core::blocks::handoff::LoadCounts;

use crate::common::{self, eventually, on_every_path};
use crate::workers::{BLOCK, ID, LAYERS, Worker, pair, worker};

/// The way to a worker, which can be cut, and lead to another one afterwards, or nowhere.
struct Cable {
    address: SocketAddr,
    leads_to: Arc<Mutex<Option<SocketAddr>>>,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cable {
    fn to(worker: &Worker) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let cable = Self {
            address: listener.local_addr().expect("address"),
            leads_to: Arc::new(Mutex::new(worker.agent.address())),
            ends: Arc::default(),
        };
        let (leads_to, ends) = (Arc::clone(&cable.leads_to), Arc::clone(&cable.ends));
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let far = *lock(&leads_to);
                let mut ends = lock(&ends);
                // Without a destination, the connection stays open and its bytes are never read.
                if let Some(far) = far {
                    let far = TcpStream::connect(far).expect("connect");
                    join(&near, &far);
                    ends.push(far);
                }
                ends.push(near);
            }
        });
        cable
    }

    fn cut(&self, leads_to: Option<SocketAddr>) {
        *lock(&self.leads_to) = leads_to;
        for end in lock(&self.ends).drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn join(near: &TcpStream, far: &TcpStream) {
    for (from, to) in [(near, far), (far, near)] {
        let ends = (from.try_clone(), to.try_clone());
        let (from, to) = (ends.0.expect("clone"), ends.1.expect("clone"));
        std::thread::spawn(move || pass(from, to));
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream) {
    let mut piece = [0; 4096];
    while let Ok(len @ 1..) = from.read(&mut piece) {
        if to.write_all(&piece[..len]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

fn counts(worker: &Worker) -> LoadCounts {
    match worker.ended() {
        Event::LoadCompleted(report) | Event::LoadFailed(report, _) => report.counts,
        other => panic!("{other:?}"),
    }
}

/// A load of four blocks over a cable, two of which are here.
fn half(producer: &Worker, consumer: &Worker) -> Cable {
    let cable = Cable::to(producer);
    let mut request = producer.request(&[1, 2, 3, 0]);
    request.producer = cable.address.to_string();
    producer.mark_ready(0, &[4, 5]);
    consumer.load(request);
    eventually("the first blocks", || {
        consumer.has(&[1, 2], producer, &[4, 5]).then_some(())
    });
    consumer.settle();
    cable
}

#[test]
fn a_load_whose_session_is_lost_goes_on_by_a_fresh_one() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let cable = half(&producer, &consumer);
        cable.cut(producer.agent.address());
        producer.mark_ready(2, &[6, 7]);
        // Each block was moved once.
        assert_eq!(consumer.loaded(), (4 * LAYERS * BLOCK) as u64);
        assert!(consumer.has(&[1, 2, 3, 0], &producer, &[4, 5, 6, 7]));
        eventually("the end of the loan", || producer.events().first().cloned());
        assert_eq!(producer.events(), [Event::Acknowledged { handoff: ID }]);
    });
}

#[test]
fn a_fresh_session_is_made_once() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let cable = half(&producer, &consumer);
        cable.cut(producer.agent.address());
        producer.mark_ready(2, &[6]);
        eventually("a block of the fresh session", || {
            consumer.has(&[3], &producer, &[6]).then_some(())
        });
        consumer.settle();
        cable.cut(producer.agent.address());
        let (missing, reason) = consumer.failed();
        assert_eq!(missing, [3]);
        assert!(reason.contains("asked again"), "{reason}");
        assert_eq!(producer.agent.num_leased(), 1);
    });
}

#[test]
fn a_fresh_session_to_another_life_of_the_producer_is_not_used() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let cable = half(&producer, &consumer);
        let another = worker(transport, 500);
        another.mark_ready(0, &[4, 5, 6, 7]);
        cable.cut(another.agent.address());
        let (missing, reason) = consumer.failed();
        assert_eq!(missing, [2, 3]);
        assert!(reason.contains("restarted"), "{reason}");
        assert_eq!(another.agent.num_leased(), 1);
    });
}

#[test]
fn a_fresh_session_that_does_not_come_is_not_waited_for() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let cable = half(&producer, &consumer);
        cable.cut(None);
        let (missing, reason) = consumer.failed();
        assert_eq!(missing, [2, 3]);
        assert!(reason.contains("no fresh session"), "{reason}");
    });
}

#[test]
fn a_load_that_has_all_blocks_needs_no_session_to_wait_for_the_sequence_state() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let cable = Cable::to(&producer);
        let mut request = producer.request(&[1, 2]);
        request.producer = cable.address.to_string();
        request.is_committed = false;
        producer.mark_ready(0, &[4, 5]);
        consumer.load(request);
        eventually("the blocks are verified", || {
            (!consumer.events().is_empty()).then_some(())
        });
        cable.cut(None);
        // Longer than a fresh session would be waited for.
        std::thread::sleep(Duration::from_millis(2500));
        assert!(matches!(consumer.events()[..], [Event::BlocksVerified(_)]));
        consumer.agent.commit(ID).expect("commit");
        consumer.loaded();
    });
}

#[test]
fn a_block_that_differs_is_read_once_more_and_no_oftener() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        producer.mark_ready(0, &[4, 5, 6]);
        eventually("the checksums", || {
            (producer.agent.num_leased() == 1).then_some(())
        });
        assert!(producer.layers[1].write(5 * BLOCK + 17, b"!"));
        consumer.load(producer.request(&[1, 2, 3]));
        assert_eq!(consumer.failed().0, [1]);
        let (blocks, regions) = (3, LAYERS as u64);
        let expected = LoadCounts {
            num_bytes: (blocks * regions + 1) * BLOCK as u64,
            num_received: 2,
            num_missing: 1,
            num_retried: 1,
            num_validated: 0,
            num_compared: blocks * regions + 1,
            num_corrupt: 2,
            backlog: Duration::ZERO,
        };
        let found = counts(&consumer);
        assert!(!found.backlog.is_zero());
        let backlog = Duration::ZERO;
        assert_eq!(LoadCounts { backlog, ..found }, expected);
    });
}

/// Spoils a byte of a leased block and mends it, until it is dropped.
struct Spoiler(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Spoiler {
    fn of(producer: &Worker, at: usize) -> Self {
        let right = common::bytes(&producer.layers[0])[at];
        let (layer, is_over) = (producer.layers[0].clone(), Arc::new(AtomicBool::new(false)));
        let until = Arc::clone(&is_over);
        let spoil = move || {
            while !until.load(Ordering::Relaxed) {
                for byte in [!right, right] {
                    assert!(layer.write(at, &[byte]));
                    std::thread::sleep(Duration::from_micros(300));
                }
            }
        };
        Self(is_over, Some(std::thread::spawn(spoil)))
    }
}

impl Drop for Spoiler {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        let ended = self.1.take().map(std::thread::JoinHandle::join);
        assert!(ended.is_some_and(|ended| ended.is_ok()));
    }
}

#[test]
fn a_block_that_was_spoilt_on_its_way_is_read_again_and_arrives() {
    on_every_path(|transport| {
        let (mut producer, mut consumer) = pair(transport);
        eventually("a load that was mended", || {
            producer.mark_ready(0, &[4]);
            eventually("the checksum", || {
                (producer.agent.num_leased() == 1).then_some(())
            });
            let spoiler = Spoiler::of(&producer, 4 * BLOCK + 17);
            std::thread::sleep(Duration::from_micros(500));
            consumer.load(producer.request(&[1]));
            let counts = counts(&consumer);
            drop(spoiler);
            let is_mended = (counts.num_received, counts.num_retried) == (1, 1);
            if is_mended {
                assert_eq!(counts.num_corrupt, 1);
                assert!(consumer.has(&[1], &producer, &[4]));
                return Some(());
            }
            (producer, consumer) = pair(transport);
            None
        });
    });
}
