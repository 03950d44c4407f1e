//! Attempts to connect to a peer: how many have failed, and how long to wait before the next one.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

/// Shortest pause after the first attempt; each further one may be twice as long, up to the cap. The backoff adds up to as
/// much at random, so that peers which were cut together do not return together.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const PAUSE_CAP: Duration = Duration::from_millis(250);

/// The attempts of a session.
#[derive(Debug)]
pub(super) struct Attempts {
    backoff: ExponentialBackoff,
    num_failed: u32,
    /// Cause of the last failure.
    cause: String,
}

impl Default for Attempts {
    fn default() -> Self {
        let backoff = ExponentialBuilder::new()
            .with_min_delay(FIRST_PAUSE)
            .with_max_delay(PAUSE_CAP)
            .without_max_times()
            .with_jitter();
        Self {
            backoff: backoff.build(),
            num_failed: 0,
            cause: String::new(),
        }
    }
}

impl Attempts {
    /// Notes that an attempt has failed, and returns the pause before the next one.
    pub(super) fn fail(&mut self, cause: String) -> Duration {
        self.num_failed += 1;
        self.cause = cause;
        self.backoff.next().unwrap_or(PAUSE_CAP)
    }

    /// Cause of the last failure, and the number of the attempt.
    pub(super) fn failure(&self) -> String {
        match self.num_failed {
            0 | 1 => self.cause.clone(),
            count => format!("{}, at attempt {count}", self.cause),
        }
    }

    /// History of earlier attempts, for the error of the one that is under way.
    pub(super) fn history(&self) -> String {
        match self.num_failed {
            0 => String::new(),
            count => format!("; {count} attempts failed before, the last: {}", self.cause),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_cap_and_differ() {
        let mut attempts = Attempts::default();
        let mut shortest = FIRST_PAUSE;
        for _ in 0..100 {
            let pause = attempts.fail("connection closed".to_owned());
            assert!(shortest <= pause && pause <= 2 * shortest, "{pause:?}");
            shortest = (2 * shortest).min(PAUSE_CAP);
        }
        let late: Vec<_> = (0..100).map(|_| attempts.fail(String::new())).collect();
        assert!(late.iter().any(|pause| *pause != late[0]), "all alike");
    }

    #[test]
    fn an_error_names_the_last_cause_and_the_number_of_attempts() {
        let mut attempts = Attempts::default();
        assert_eq!(attempts.history(), "");
        attempts.fail("connection closed".to_owned());
        assert_eq!(attempts.failure(), "connection closed");
        attempts.fail("connection reset".to_owned());
        assert_eq!(attempts.failure(), "connection reset, at attempt 2");
        let history = "; 2 attempts failed before, the last: connection reset";
        assert_eq!(attempts.history(), history);
    }
}
