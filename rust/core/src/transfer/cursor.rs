//! How far along its pieces a transfer is.

use super::region::Run;

/// A place in a list of runs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cursor {
    /// The run that comes next, and what of it is behind.
    next: usize,
    within: u64,
    num_behind: u64,
}

impl Cursor {
    /// What comes next, at most `cap` bytes of it.
    pub(crate) fn piece(self, runs: &[Run], cap: u64) -> Option<Run> {
        let run = runs.get(self.next)?;
        Some(Run {
            to: run.to + self.within,
            from: run.from + self.within,
            len: (run.len - self.within).min(cap),
        })
    }

    /// The next `len` bytes, all of one run, are behind.
    pub(crate) fn advance(&mut self, runs: &[Run], len: u64) {
        self.within += len;
        self.num_behind += len;
        if runs
            .get(self.next)
            .is_some_and(|run| run.len == self.within)
        {
            (self.next, self.within) = (self.next + 1, 0);
        }
    }

    /// Bytes of all runs that are behind.
    pub(crate) fn num_behind(self) -> u64 {
        self.num_behind
    }
}
