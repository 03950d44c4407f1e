//! How long a peer that owes an answer is waited for when the caller's deadline has passed. One that is awake gets time:
//! it may be late on a busy machine. One that is stopped or cut off gets none, because the caller waits.

use std::time::{Duration, Instant};

use crate::ids::SessionKey;
use crate::reactor::ReactorContext;

/// So long before the deadline the peer is asked for a sign of life.
const ASK_BEFORE: Duration = Duration::from_millis(500);
/// Whoever answers within this is asked for nothing.
const ASK_AFTER: Duration = Duration::from_millis(20);
/// What a peer that gives signs of life may be late: a caller knows within a second.
const AWAKE: Duration = Duration::from_millis(900);
/// What a silent one may be late: a caller knows within 100 ms. A late one is asked again that often.
const SILENT: Duration = Duration::from_millis(50);
/// What an answer to the question may take: a far peer, or one that was kept from its CPU, is not silent.
const SILENCE: Duration = Duration::from_millis(250);

/// Where an operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerStage {
    /// Its deadline has not passed.
    InTime,
    /// It has; the answer may still come.
    Late,
    /// No answer is waited for any more.
    Over,
}

/// The wait for a peer's answer to one operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GracePeriod {
    deadline: Instant,
    /// When it is asked next.
    ask_at: Instant,
    asked: Option<Probe>,
}

#[derive(Debug, Clone, Copy)]
struct Probe {
    /// When first.
    first: Instant,
    /// When first since it was heard.
    unanswered: Instant,
}

impl GracePeriod {
    /// For an operation that begins now.
    pub(crate) fn new(now: Instant, deadline: Instant) -> Self {
        let before = deadline.checked_sub(ASK_BEFORE).unwrap_or(now);
        Self {
            deadline,
            ask_at: before.max(now + ASK_AFTER),
            asked: None,
        }
    }

    /// Looks where it stands. Asks the peers for a sign of life when it is time for that.
    pub(crate) fn look(&mut self, cx: &mut ReactorContext, sessions: &[SessionKey]) -> AnswerStage {
        let stage = self.stage(cx.now, last_rx(cx, sessions));
        if stage != AnswerStage::Over && self.is_time_to_ask(cx.now, last_rx(cx, sessions)) {
            for session in sessions {
                cx.ping(*session);
            }
        }
        stage
    }

    /// The answer has been due since now only: this side was late to ask for it.
    pub(crate) fn due_from(&mut self, now: Instant) {
        self.deadline = now;
    }

    /// When to look again.
    pub(crate) fn next(&self, cx: &ReactorContext, sessions: &[SessionKey]) -> Instant {
        let over_at = self.over_at(last_rx(cx, sessions));
        let next = over_at.map_or(self.ask_at, |at| at.min(self.ask_at));
        if self.deadline > cx.now {
            return next.min(self.deadline);
        }
        next
    }

    fn is_time_to_ask(&mut self, now: Instant, last_rx: Option<Instant>) -> bool {
        let is_time = now >= self.ask_at;
        if is_time {
            let asked = self.asked.get_or_insert(Probe {
                first: now,
                unanswered: now,
            });
            if last_rx > Some(asked.unanswered) {
                asked.unanswered = now;
            }
            self.ask_at = self.deadline.max(now + SILENT);
        }
        is_time
    }

    fn stage(&self, now: Instant, last_rx: Option<Instant>) -> AnswerStage {
        if now < self.deadline {
            return AnswerStage::InTime;
        }
        match self.over_at(last_rx) {
            Some(at) if at <= now => AnswerStage::Over,
            _ => AnswerStage::Late,
        }
    }

    /// This side may be late too: what the peer is asked it has time to answer.
    fn over_at(&self, last_rx: Option<Instant>) -> Option<Instant> {
        let Probe { first, unanswered } = self.asked?;
        let awake = self.deadline.max(first) + AWAKE;
        if last_rx > Some(unanswered) {
            return Some(awake);
        }
        let silent = (self.deadline + SILENT).max(unanswered + SILENCE);
        Some(silent.min(awake))
    }
}

/// Since when there has been silence of one of them.
fn last_rx(cx: &ReactorContext, sessions: &[SessionKey]) -> Option<Instant> {
    sessions
        .iter()
        .map(|session| cx.last_rx(*session))
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

    /// How late an operation is over whose peer answers each question after so long, as far as it answers.
    fn over(timeout: Duration, answer: impl Fn(Duration) -> Option<Duration>) -> Duration {
        let begun = Instant::now();
        let mut grace = GracePeriod::new(begun, begun + timeout);
        let (mut last_rx, mut answers) = (Some(begun), Vec::new());
        for now in (0..5000).map(|count| begun + ms(count)) {
            answers.retain(|at| {
                last_rx = last_rx.max(Some(*at).filter(|at| *at <= now));
                *at > now
            });
            if grace.stage(now, last_rx) == AnswerStage::Over {
                return now.duration_since(begun + timeout);
            }
            if grace.is_time_to_ask(now, last_rx) {
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
    fn a_peer_that_is_awake_gets_time_for_its_answer_though_not_a_second() {
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
    fn a_peer_that_stops_after_it_was_asked_first_is_known_at_the_next_question() {
        let stopped_at = TIMEOUT.checked_sub(ms(400)).unwrap();
        let late = over(TIMEOUT, |at| (at < stopped_at).then_some(ms(1)));
        assert!(late <= ms(300), "{late:?}");
    }

    #[test]
    fn a_peer_that_stops_when_it_is_late_is_known_at_the_next_question() {
        let stopped_at = TIMEOUT + ms(300);
        let late = over(TIMEOUT, |at| (at < stopped_at).then_some(ms(1)));
        assert!(late >= ms(500) && late <= ms(600), "{late:?}");
    }

    #[test]
    fn a_side_that_was_late_itself_gives_the_peer_the_same_time() {
        let begun = Instant::now();
        let mut grace = GracePeriod::new(begun, begun + ms(100));
        let woken = begun + TIMEOUT;
        assert_eq!(grace.stage(woken, Some(begun)), AnswerStage::Late);
        assert!(grace.is_time_to_ask(woken, Some(begun)));
        assert_eq!(grace.stage(woken, Some(begun)), AnswerStage::Late);
    }
}
