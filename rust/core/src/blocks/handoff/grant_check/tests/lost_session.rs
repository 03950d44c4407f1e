//! The session is lost before the answer.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::*;

/// The way to a producer, which can be cut, and lead to another one afterwards.
struct Cable {
    address: SocketAddr,
    leads_to: Arc<Mutex<SocketAddr>>,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cable {
    /// The time of both ends stands still: this thread runs both, and a fresh session has a deadline.
    fn to(producer: &Side) -> Self {
        clock::stop();
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let cable = Self {
            address: listener.local_addr().expect("address"),
            leads_to: Arc::new(Mutex::new(producer.agent.address().expect("address"))),
            ends: Arc::default(),
        };
        let (leads_to, ends) = (Arc::clone(&cable.leads_to), Arc::clone(&cable.ends));
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                // The lock keeps `cut` out until both ends are known.
                let (leads_to, mut ends) = (leads_to.lock(), ends.lock().expect("lock"));
                let far = TcpStream::connect(*leads_to.expect("lock")).expect("connect");
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (clone(from), clone(to));
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                ends.extend([near, far]);
            }
        });
        cable
    }

    fn cut(&self, leads_to: &Side) {
        *self.leads_to.lock().expect("lock") = leads_to.agent.address().expect("address");
        for end in self.ends.lock().expect("lock").drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

fn clone(stream: &TcpStream) -> TcpStream {
    stream.try_clone().expect("clone")
}

/// Runs the consumer until its load ends, and returns the event. `round` runs the others, and gets the time since the
/// start.
fn until_ended(consumer: &Side, round: impl Fn(Duration)) -> Event {
    let began = Instant::now();
    loop {
        settle(&[&consumer.agent]);
        if let Some(ended) = consumer.ended() {
            return ended;
        }
        round(began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Outcome of a load whose session is lost while it waits for the answer. The cable leads to `next` afterwards.
fn lost_while_validating(producer: &Side, next: &Side) -> Event {
    let consumer = side(MemoryPath::RemoteRead, 0);
    let cable = Cable::to(producer);
    read(producer, &consumer, cable.address);
    cable.cut(next);
    until_ended(&consumer, |after| {
        // The producer's answer to the question of the lost session is not to arrive by it.
        if after > Duration::from_millis(100) {
            settle(&[&next.agent]);
        }
    })
}

#[test]
fn a_load_whose_session_is_lost_before_the_answer_asks_again_on_a_fresh_one() {
    let producer = side(MemoryPath::RemoteRead, 1);
    let ended = lost_while_validating(&producer, &producer);
    let counts = completed(Some(ended));
    assert_eq!(counts.num_validated, 1);
    assert_eq!(counts.num_bytes, BLOCK as u64, "nothing is read again");
}

#[test]
fn another_life_of_the_producer_is_not_asked_although_it_has_the_handoff_and_the_epoch() {
    let [producer, another] = [1, 2].map(|content| side(MemoryPath::RemoteRead, content));
    another.mark_ready([ID].into_iter());
    let ended = lost_while_validating(&producer, &another);
    let reason = assert_nothing_counts(Some(ended));
    assert!(reason.contains("restarted"), "{reason}");
}

#[test]
fn a_handoff_id_that_is_used_again_while_the_session_is_lost_leaves_nothing_of_its_first_epoch() {
    // In how many regions the first grant is ready, and from which position on the second one is. The load selects none
    // of what is ready from the last position on: only the answer can tell it of another epoch.
    let (again, ended) = ("began it again", "before its blocks were validated");
    for (num_regions, first, expected) in [(1, 0, again), (2, 0, again), (2, 2, ended)] {
        let path = MemoryPath::RemoteRead;
        let [producer, consumer] = [1, 0].map(|content| Side::with_two_regions(path, content));
        producer.mark_ready_in(0..num_regions, 0, [ID].into_iter());
        let cable = Cable::to(&producer);
        consumer.load_from(ID, &producer, cable.address);
        let num_bytes = num_regions * 2 * BLOCK;
        while consumer.content()[..num_bytes] != vec![1; num_bytes] {
            producer.agent.round();
            settle(&[&consumer.agent]);
        }
        let peer = consumer.agent.peers().remove(0);
        cable.cut(&producer);
        while peer.lost().is_none() {
            settle(&[&consumer.agent]);
        }
        end_and_forget(&producer);
        producer.fill(9);
        producer.mark_ready_in(0..2, first, [ID].into_iter());
        let event = until_ended(&consumer, |_| settle(&[&producer.agent]));
        let Event::LoadFailed(_, failure) = event else {
            panic!("{num_regions} {first}: {event:?}");
        };
        assert_eq!(failure.missing, [0, 1]);
        assert!(failure.reason.contains(expected), "{}", failure.reason);
    }
}
