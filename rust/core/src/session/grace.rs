//! Grace period after a caller's deadline. A peer that still answers PINGs gets extra time, because it may only be slow. A
//! silent peer, stopped or cut off, gets none, because the caller waits.

use std::time::{Duration, Instant};

use crate::ids::SessionKey;
use crate::session::Links;

/// Time between the first PING and the deadline.
const PING_LEAD: Duration = Duration::from_millis(500);
/// An operation that ends within this sends no PING.
const PING_DELAY: Duration = Duration::from_millis(20);
/// Grace period for a responsive peer: a caller knows within a second.
const RESPONSIVE_GRACE: Duration = Duration::from_millis(900);
/// Time from the deadline until an operation with a responsive peer is cancelled, unless its deadline ends it. The rest
/// is for the answer.
const CANCEL_AFTER: Duration = Duration::from_millis(450);
/// Grace period for a silent peer: a caller knows within 100 ms. A late peer is sent PINGs this far apart.
const SILENT_GRACE: Duration = Duration::from_millis(50);
/// Timeout of the answer to a PING: a far peer, or one that was kept from its CPU, is not silent.
const PING_TIMEOUT: Duration = Duration::from_millis(250);

/// Stage of the wait for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerStage {
    /// The deadline has not passed.
    InTime,
    /// The deadline has passed; the answer may still come.
    Late,
    /// The grace period has ended. The session decides whether a peer that does not answer PINGs is lost.
    Overdue,
}

/// The wait for the answers of one or more peers to one operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GracePeriod {
    deadline: Instant,
    ping_at: Instant,
    probe: Option<Probe>,
}

/// PINGs that were sent.
#[derive(Debug, Clone, Copy)]
struct Probe {
    /// The first one.
    first: Instant,
    /// The first one since bytes of the peer came last.
    unanswered: Instant,
}

impl GracePeriod {
    /// For an operation that begins now.
    pub(crate) fn new(now: Instant, deadline: Instant) -> Self {
        let before = deadline.checked_sub(PING_LEAD).unwrap_or(now);
        Self {
            deadline,
            ping_at: before.max(now + PING_DELAY),
            probe: None,
        }
    }

    /// The stage now. Sends PINGs when it is time.
    pub(crate) fn look(&mut self, links: &mut Links, sessions: &[SessionKey]) -> AnswerStage {
        let stage = self.stage(links.now(), last_rx(links, sessions));
        let is_waited_for = matches!(stage, AnswerStage::InTime | AnswerStage::Late);
        if is_waited_for && self.is_time_to_ping(links.now(), last_rx(links, sessions)) {
            for session in sessions {
                links.ping(*session);
            }
        }
        stage
    }

    /// Moves the deadline to `now`: this side sent its request late.
    pub(crate) fn due_from(&mut self, now: Instant) {
        self.deadline = now;
    }

    /// True if it is time to cancel an operation that may end a little later than its deadline.
    pub(crate) fn is_time_to_cancel(&self, now: Instant) -> bool {
        let first = self.probe.map_or(self.deadline, |probe| probe.first);
        now >= self.deadline.max(first) + CANCEL_AFTER
    }

    /// Time of the next check.
    pub(crate) fn next(&self, links: &Links, sessions: &[SessionKey]) -> Instant {
        let over = self.over(last_rx(links, sessions));
        let next = over.map_or(self.ping_at, |at| at.min(self.ping_at));
        if self.deadline > links.now() {
            return next.min(self.deadline);
        }
        next
    }

    fn is_time_to_ping(&mut self, now: Instant, last_rx: Option<Instant>) -> bool {
        let is_time = now >= self.ping_at;
        if is_time {
            let probe = self.probe.get_or_insert(Probe {
                first: now,
                unanswered: now,
            });
            if last_rx > Some(probe.unanswered) {
                probe.unanswered = now;
            }
            self.ping_at = self.deadline.max(now + SILENT_GRACE);
        }
        is_time
    }

    fn stage(&self, now: Instant, last_rx: Option<Instant>) -> AnswerStage {
        if now < self.deadline {
            return AnswerStage::InTime;
        }
        match self.over(last_rx) {
            Some(at) if at <= now => AnswerStage::Overdue,
            _ => AnswerStage::Late,
        }
    }

    /// End of the grace period. It never ends before the peer has had time to answer a PING, because this side may be
    /// late too.
    fn over(&self, last_rx: Option<Instant>) -> Option<Instant> {
        let Probe { first, unanswered } = self.probe?;
        let responsive = self.deadline.max(first) + RESPONSIVE_GRACE;
        let silent = (self.deadline + SILENT_GRACE).max(unanswered + PING_TIMEOUT);
        let is_responsive = last_rx > Some(unanswered);
        Some(if is_responsive {
            responsive
        } else {
            responsive.min(silent)
        })
    }
}

#[cfg(test)]
impl GracePeriod {
    /// One that ends a second after `now`, of a peer that goes on answering PINGs.
    pub(crate) fn of_responsive_peer(now: Instant) -> Self {
        let (first, unanswered) = (now, now + RESPONSIVE_GRACE);
        Self {
            deadline: now,
            ping_at: unanswered,
            probe: Some(Probe { first, unanswered }),
        }
    }
}

/// Time of the last bytes of the peer that has been silent longest.
fn last_rx(links: &Links, sessions: &[SessionKey]) -> Option<Instant> {
    sessions
        .iter()
        .map(|session| links.last_rx(*session))
        .min()
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(2);

    const fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    /// Delay after its deadline until an operation is overdue. `answer` returns the delay of the peer's answer to the
    /// PING of a time, or none.
    fn over(timeout: Duration, answer: impl Fn(Duration) -> Option<Duration>) -> Duration {
        let begun = Instant::now();
        let mut grace = GracePeriod::new(begun, begun + timeout);
        let (mut last_rx, mut answers) = (Some(begun), Vec::new());
        for now in (0..5000).map(|count| begun + ms(count)) {
            answers.retain(|at| {
                last_rx = last_rx.max(Some(*at).filter(|at| *at <= now));
                *at > now
            });
            if grace.stage(now, last_rx) == AnswerStage::Overdue {
                return now.duration_since(begun + timeout);
            }
            if grace.is_time_to_ping(now, last_rx) {
                answers.extend(answer(now - begun).map(|after| now + after));
            }
        }
        panic!("never over");
    }

    const TIMEOUTS: [Duration; 4] = [Duration::ZERO, ms(10), ms(100), TIMEOUT];

    #[test]
    fn a_caller_is_answered_within_100_ms_of_the_deadline_when_the_peer_is_silent() {
        for timeout in [ms(200), ms(500), TIMEOUT] {
            let late = over(timeout, |_| None);
            assert!(late <= ms(100), "{late:?} after {timeout:?}");
        }
    }

    #[test]
    fn a_caller_with_hardly_a_deadline_waits_as_long_as_an_answer_may_take() {
        for timeout in [Duration::ZERO, ms(10), ms(100)] {
            let late = over(timeout, |_| None);
            assert!(
                late >= ms(170) && late <= ms(270),
                "{late:?} after {timeout:?}"
            );
        }
    }

    #[test]
    fn a_responsive_peer_gets_extra_time_though_not_a_second() {
        for timeout in TIMEOUTS {
            for after in [ms(1), ms(30), ms(200)] {
                let late = over(timeout, |_| Some(after));
                assert!(
                    late >= ms(800) && late < ms(1000),
                    "{late:?} after {timeout:?}"
                );
            }
        }
    }

    #[test]
    fn a_peer_that_stops_after_the_first_ping_is_known_at_the_next() {
        let stopped_at = TIMEOUT.checked_sub(ms(400)).unwrap();
        let late = over(TIMEOUT, |at| (at < stopped_at).then_some(ms(1)));
        assert!(late <= ms(300), "{late:?}");
    }

    #[test]
    fn a_peer_that_stops_when_it_is_late_is_known_at_the_next_ping() {
        let stopped_at = TIMEOUT + ms(300);
        let late = over(TIMEOUT, |at| (at < stopped_at).then_some(ms(1)));
        assert!(late >= ms(500) && late <= ms(600), "{late:?}");
    }

    #[test]
    fn the_answer_to_a_cancel_has_time_before_the_grace_period_ends() {
        for timeout in TIMEOUTS {
            let begun = Instant::now();
            let mut grace = GracePeriod::new(begun, begun + timeout);
            let deadline = begun + timeout;
            assert!(grace.is_time_to_ping(deadline.max(begun + PING_DELAY), Some(begun)));
            assert!(!grace.is_time_to_cancel(deadline + ms(449)));
            let cancelled_at = deadline + ms(470);
            assert!(grace.is_time_to_cancel(cancelled_at));
            let over = grace.over(Some(cancelled_at));
            assert!(over >= Some(cancelled_at + ms(430)));
        }
    }

    #[test]
    fn a_side_that_was_late_itself_gives_the_peer_the_same_time() {
        let begun = Instant::now();
        let mut grace = GracePeriod::new(begun, begun + ms(100));
        let woken = begun + TIMEOUT;
        assert_eq!(grace.stage(woken, Some(begun)), AnswerStage::Late);
        assert!(grace.is_time_to_ping(woken, Some(begun)));
        assert_eq!(grace.stage(woken, Some(begun)), AnswerStage::Late);
    }
}
