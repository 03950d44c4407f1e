//! When a transfer reached each of its steps: a trace shows where its time went.

use std::time::Instant;

/// Times of the steps of a transfer; none of a step that its path does not have, or that it has not reached.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps {
    added: Instant,
    /// Its turn came.
    pub(super) began: Option<Instant>,
    /// The last read was posted, or the last copy launched.
    pub(super) posted: Option<Instant>,
    /// The last bytes were here, as far as the device, the kernel or the connection says.
    pub(super) moved: Option<Instant>,
    /// The engine handed it over.
    completed: Option<Instant>,
}

impl Steps {
    pub(crate) fn begin() -> Self {
        Self {
            added: Instant::now(),
            began: None,
            posted: None,
            moved: None,
            completed: None,
        }
    }

    /// It is over; copies between GPUs ended at the time that their driver reported.
    pub(super) fn complete(self, copied: Option<Instant>) -> Self {
        Self {
            moved: copied.or(self.moved),
            completed: Some(Instant::now()),
            ..self
        }
    }

    /// Time at which its turn came.
    pub(crate) fn began(&self) -> Instant {
        self.began.unwrap_or(self.added)
    }

    /// Each step that it has taken: its name, when it began and when it ended. One follows the other.
    pub(crate) fn spans(&self) -> impl Iterator<Item = (&'static str, Instant, Instant)> {
        let ends = [
            ("turn", self.began),
            ("posted", self.posted),
            ("moved", self.moved),
            ("reported", self.completed),
        ];
        let mut last = self.added;
        ends.into_iter().filter_map(move |(name, end)| {
            let began = last;
            last = end?.max(began);
            Some((name, began, last))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn steps_follow_one_another_and_those_that_a_path_lacks_are_left_out() {
        let mut steps = Steps::begin();
        let at = |micros| Some(steps.added + Duration::from_micros(micros));
        (steps.began, steps.moved, steps.completed) = (at(1), at(5), at(9));
        let micros = |(name, began, ended): (_, Instant, Instant)| {
            let since = |time: Instant| time.duration_since(steps.added).as_micros();
            (name, since(began), since(ended))
        };
        let spans: Vec<_> = steps.spans().map(micros).collect();
        assert_eq!(spans, [("turn", 0, 1), ("moved", 1, 5), ("reported", 5, 9)]);
    }
}
