//! Places of handshakes: how many peers may be unproved at once, and which of them gives way to a connection that waits.
//!
//! A peer holds a place from the moment it is accepted until it has proved the token. So a crowd of peers shares the places
//! for a round trip each, and peers that hold the token never give way.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::ids::SessionKey;
use crate::net::handshake::HandshakeProgress;

/// Most handshakes at once of peers that have not proved the token. Further connections wait in the listener's backlog.
pub(super) const HANDSHAKES_CAP: usize = 256;
/// Age at which a handshake gives way to a connection that waits.
const EVICTION_AGE: Duration = Duration::from_secs(1);
/// The same for a peer whose HELLO has not come. HELLO follows the connection without a round trip, however far the peer is.
const SILENT_EVICTION_AGE: Duration = Duration::from_millis(100);

/// The handshakes that hold a place, with the time of their accept.
#[derive(Debug, Default)]
pub(super) struct HandshakePlaces {
    silent: BTreeMap<SessionKey, Instant>,
    greeted: BTreeMap<SessionKey, Instant>,
}

impl HandshakePlaces {
    pub(super) fn len(&self) -> usize {
        self.silent.len() + self.greeted.len()
    }

    /// True if all places are taken.
    pub(super) fn is_full(&self) -> bool {
        self.len() >= HANDSHAKES_CAP
    }

    /// A peer was accepted.
    pub(super) fn add(&mut self, key: SessionKey, now: Instant) {
        self.silent.insert(key, now);
    }

    /// A peer may have come further.
    pub(super) fn update(&mut self, key: SessionKey, progress: HandshakeProgress) {
        match progress {
            HandshakeProgress::Silent => {}
            HandshakeProgress::Greeted => {
                let accepted = self.silent.remove(&key);
                self.greeted
                    .extend(accepted.map(|accepted| (key, accepted)));
            }
            HandshakeProgress::Proved => self.remove(key),
        }
    }

    /// A session has ended.
    pub(super) fn remove(&mut self, key: SessionKey) {
        if self.silent.remove(&key).is_none() {
            self.greeted.remove(&key);
        }
    }

    /// The handshake that gives way to a connection that waits; `Err`: when one may.
    pub(super) fn evictable(&self, now: Instant) -> Result<SessionKey, Instant> {
        // Keys ascend, so that the first one is the oldest.
        let silent = oldest(&self.silent, SILENT_EVICTION_AGE);
        let greeted = oldest(&self.greeted, EVICTION_AGE);
        let candidates = || silent.into_iter().chain(greeted);
        let due = candidates().find(|(_, at)| *at <= now);
        due.map(|(key, _)| key).ok_or_else(|| {
            let next = candidates().map(|(_, at)| at).min();
            next.unwrap_or(now + SILENT_EVICTION_AGE)
        })
    }
}

/// The oldest handshake, and when it has reached an age.
fn oldest(
    handshakes: &BTreeMap<SessionKey, Instant>,
    age: Duration,
) -> Option<(SessionKey, Instant)> {
    let (key, accepted) = handshakes.first_key_value()?;
    Some((*key, *accepted + age))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_millis(1);

    /// All places taken by silent peers that were accepted at once.
    fn full(now: Instant) -> HandshakePlaces {
        let mut places = HandshakePlaces::default();
        for key in 0..HANDSHAKES_CAP as SessionKey {
            assert!(!places.is_full());
            places.add(key, now);
        }
        assert!(places.is_full());
        places
    }

    #[test]
    fn a_handshake_gives_way_only_when_it_is_a_second_old() {
        let (mut places, start) = (HandshakePlaces::default(), Instant::now());
        for key in [1, 2] {
            places.add(key, start + key as u32 * MOMENT);
            places.update(key, HandshakeProgress::Greeted);
        }
        let early = start + EVICTION_AGE;
        let due = early + MOMENT;
        assert_eq!(places.evictable(early), Err(due));
        assert_eq!(places.evictable(due), Ok(1));
        places.remove(1);
        assert_eq!(places.evictable(due), Err(due + MOMENT));
    }

    #[test]
    fn a_peer_that_has_sent_no_hello_gives_way_after_a_tenth_of_that_and_before_one_that_has() {
        let (mut places, start) = (HandshakePlaces::default(), Instant::now());
        places.add(1, start);
        places.update(1, HandshakeProgress::Greeted);
        places.add(2, start + EVICTION_AGE);
        places.update(2, HandshakeProgress::Silent);
        let due = start + EVICTION_AGE + SILENT_EVICTION_AGE;
        assert_eq!(places.evictable(start + EVICTION_AGE), Ok(1));
        assert_eq!(places.evictable(due), Ok(2));
    }

    #[test]
    fn a_peer_that_has_proved_the_token_holds_no_place_and_never_gives_way() {
        let start = Instant::now();
        let mut places = full(start);
        places.update(7, HandshakeProgress::Proved);
        assert!(!places.is_full());
        for _ in 1..HANDSHAKES_CAP {
            let evicted = places.evictable(start + EVICTION_AGE).expect("all are old");
            assert_ne!(evicted, 7);
            places.remove(evicted);
        }
        assert!(places.evictable(start + EVICTION_AGE).is_err());
    }

    /// A peer behind a full backlog of silent strangers still has most of the ten seconds that its handshake may take.
    #[test]
    fn four_thousand_silent_strangers_give_way_within_two_seconds() {
        let start = Instant::now();
        let (mut places, mut now) = (full(start), start);
        for key in 0..4096 {
            match places.evictable(now) {
                Ok(evicted) => places.remove(evicted),
                Err(due) => {
                    now = due;
                    places.remove(places.evictable(now).expect("due"));
                }
            }
            places.add(HANDSHAKES_CAP as SessionKey + key, now);
        }
        assert!(now - start < Duration::from_secs(2), "{:?}", now - start);
    }
}
