//! How long a peer that owes an answer is waited for when the caller's deadline has passed. One that is awake gets time:
//! it may be late on a busy machine. One that is stopped or cut off gets none, because the caller waits.

use std::time::{Duration, Instant};

use super::{Io, LinkId};

/// So long before the deadline the peer is asked for a sign of life.
const ASK_BEFORE: Duration = Duration::from_millis(500);
/// Whoever answers within this is asked for nothing.
const ASK_AFTER: Duration = Duration::from_millis(20);
/// What a peer that gave a sign of life may be late.
const AWAKE: Duration = Duration::from_millis(500);
/// What a silent one may be late: a caller knows within 100 ms.
const SILENT: Duration = Duration::from_millis(50);

/// Where an operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its deadline has not passed.
    InTime,
    /// It has; the answer may still come.
    Late,
    /// No answer is waited for any more. The peer is awake, or has been silent since it was asked.
    Over { is_awake: bool },
}

/// The wait for a peer's answer to one operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    deadline: Instant,
    ask_at: Instant,
    asked_at: Option<Instant>,
}

impl Patience {
    /// For an operation that begins now.
    pub(crate) fn new(now: Instant, deadline: Instant) -> Self {
        let before = deadline.checked_sub(ASK_BEFORE).unwrap_or(now);
        Self {
            deadline,
            ask_at: before.max(now + ASK_AFTER),
            asked_at: None,
        }
    }

    /// Looks where it stands. Asks the peers for a sign of life when it is time for that.
    pub(crate) fn look(&mut self, io: &mut Io, links: &[LinkId]) -> Stage {
        if self.is_time_to_ask(io.now) {
            for link in links {
                io.ask(*link);
            }
        }
        self.stage(io.now, heard(io, links))
    }

    /// The answer has been due since now only: this side was late to ask for it.
    pub(crate) fn due_from(&mut self, now: Instant) {
        self.deadline = now;
    }

    /// When to look again.
    pub(crate) fn next(&self, io: &Io, links: &[LinkId]) -> Instant {
        let next = self.over_at(heard(io, links)).unwrap_or(self.ask_at);
        if self.deadline > io.now {
            return next.min(self.deadline);
        }
        next
    }

    fn is_time_to_ask(&mut self, now: Instant) -> bool {
        let is_time = self.asked_at.is_none() && now >= self.ask_at;
        if is_time {
            self.asked_at = Some(now);
        }
        is_time
    }

    fn stage(&self, now: Instant, heard: Option<Instant>) -> Stage {
        if now < self.deadline {
            return Stage::InTime;
        }
        let is_awake = self.is_awake(heard);
        match self.over_at(heard) {
            Some(at) if at <= now => Stage::Over { is_awake },
            _ => Stage::Late,
        }
    }

    /// This side may be late too: what the peer is asked it has time to answer.
    fn over_at(&self, heard: Option<Instant>) -> Option<Instant> {
        let late = if self.is_awake(heard) { AWAKE } else { SILENT };
        Some(self.deadline.max(self.asked_at?) + late)
    }

    fn is_awake(&self, heard: Option<Instant>) -> bool {
        self.asked_at.is_some_and(|asked_at| heard > Some(asked_at))
    }
}

/// Since when there has been silence of one of them.
fn heard(io: &Io, links: &[LinkId]) -> Option<Instant> {
    links.iter().map(|link| io.heard(*link)).min().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(2);

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    /// When an operation is over whose peer is heard that long after it was asked, and whether it counts as awake.
    fn over(timeout: Duration, answers_after: Option<Duration>) -> (Duration, bool) {
        let begun = Instant::now();
        let mut patience = Patience::new(begun, begun + timeout);
        let mut heard = Some(begun);
        for now in (0..5000).map(|count| begun + ms(count)) {
            patience.is_time_to_ask(now);
            let answers_at = patience.asked_at.zip(answers_after);
            if answers_at.is_some_and(|(asked, after)| now >= asked + after) {
                heard = heard.max(Some(now));
            }
            if let Stage::Over { is_awake } = patience.stage(now, heard) {
                return (now.duration_since(begun + timeout), is_awake);
            }
        }
        panic!("never over");
    }

    #[test]
    fn a_caller_is_answered_within_100_ms_of_the_deadline_when_the_peer_is_silent() {
        for timeout in [Duration::ZERO, ms(10), ms(100), TIMEOUT] {
            let (late, is_awake) = over(timeout, None);
            assert!(late <= ms(100), "{late:?} after {timeout:?}");
            assert!(!is_awake);
        }
    }

    #[test]
    fn a_peer_that_is_awake_gets_time_for_its_answer_though_not_a_second() {
        for timeout in [Duration::ZERO, ms(10), ms(100), TIMEOUT] {
            let (late, is_awake) = over(timeout, Some(ms(50)));
            assert!(
                late >= ms(400) && late < ms(1000),
                "{late:?} after {timeout:?}"
            );
            assert!(is_awake);
        }
    }

    #[test]
    fn a_side_that_was_late_itself_gives_the_peer_the_same_time() {
        let begun = Instant::now();
        let mut patience = Patience::new(begun, begun + ms(100));
        let woken = begun + TIMEOUT;
        assert!(patience.is_time_to_ask(woken));
        assert_eq!(patience.stage(woken, Some(begun)), Stage::Late);
    }
}
