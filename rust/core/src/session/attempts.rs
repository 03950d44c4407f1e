//! Attempts to connect to a peer: how many have failed, and how long to wait before the next one.

use std::time::Duration;

use crate::net::identity::random;

/// Longest pause after the first attempt; each further one may be twice as long, up to the cap.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const PAUSE_CAP: Duration = Duration::from_millis(500);

/// The attempts of a session.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    num_failed: u32,
    /// Why the last one failed.
    cause: String,
}

impl Attempts {
    /// Notes that an attempt has failed. Returns the pause before the next one: between half of the longest and the longest,
    /// at random, so that peers which were cut together do not return together.
    pub(super) fn fail(&mut self, cause: String) -> Duration {
        let factor = 1 << self.num_failed.min(10);
        let longest = (FIRST_PAUSE * factor).min(PAUSE_CAP);
        self.num_failed += 1;
        self.cause = cause;
        // Without randomness the pause is the longest.
        let [jitter] = random().unwrap_or([u8::MAX]);
        longest / 2 + longest / 2 * u32::from(jitter) / u32::from(u8::MAX)
    }

    /// Why the last attempt failed, and which one it was.
    pub(super) fn failure(&self) -> String {
        match self.num_failed {
            0 | 1 => self.cause.clone(),
            count => format!("{}, at attempt {count}", self.cause),
        }
    }

    /// For the error of an attempt that is under way: what happened to those before.
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
        let mut longest = FIRST_PAUSE;
        for _ in 0..100 {
            let pause = attempts.fail("connection closed".to_owned());
            assert!(longest / 2 <= pause && pause <= longest, "{pause:?}");
            longest = (2 * longest).min(PAUSE_CAP);
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
