//! Validation of the blocks of a load that came without checksums. Once the load's reads have ended, the consumer asks
//! the producer if its grant still holds. A positive answer covers every read that had ended before the question.

use super::load::Load;
use crate::ids::Epoch;

/// A load's question to its producer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Question {
    #[default]
    NotAsked,
    /// It has this number, which its answer repeats.
    Asked(u64),
    /// The grant held.
    Valid,
}

/// The blocks of a load without checksums.
#[derive(Debug, Default)]
pub(super) struct Validation {
    /// Number of arrived blocks, one for each block and region.
    num_blocks: u64,
    question: Question,
}

impl Validation {
    /// Blocks without checksums have arrived.
    pub(super) fn arrived(&mut self, num_blocks: u64) {
        self.num_blocks += num_blocks;
    }

    /// True if there are such blocks, and it is not known that they count.
    pub(super) fn is_open(&self) -> bool {
        self.num_blocks > 0 && self.question != Question::Valid
    }

    /// True if an answer is awaited.
    pub(super) fn is_asked(&self) -> bool {
        matches!(self.question, Question::Asked(_))
    }

    /// The question has been sent.
    pub(super) fn asked(&mut self, question: u64) {
        self.question = Question::Asked(question);
    }

    /// The session is lost, and the answer with it.
    pub(super) fn session_lost(&mut self) {
        if self.is_asked() {
            self.question = Question::NotAsked;
        }
    }

    /// Receives an answer; whether it is that to the question. Another load may have asked before.
    pub(super) fn answered(&mut self, question: u64, is_valid: bool) -> bool {
        let is_answer = self.question == Question::Asked(question);
        if is_answer && is_valid {
            self.question = Question::Valid;
        }
        is_answer
    }

    /// Blocks that count because the grant held.
    pub(super) fn num_validated(&self) -> u64 {
        match self.question {
            Question::Valid => self.num_blocks,
            Question::NotAsked | Question::Asked(_) => 0,
        }
    }
}

/// Its part of a load.
impl Load {
    /// True if blocks are here that count only if the producer's grant still holds.
    pub(super) fn needs_validation(&self) -> bool {
        self.validation.is_open() && !self.is_withdrawn()
    }

    /// The epoch of which the producer is to be asked now whether it still holds: nothing of the load is being read, and
    /// nothing will be.
    pub(super) fn epoch_to_validate(&self) -> Option<Epoch> {
        let is_due = self.needs_validation() && !self.validation.is_asked() && !self.is_reading();
        self.epoch
            .filter(|_| is_due && (self.has_ended() || self.is_complete()))
    }

    pub(super) fn validation_asked(&mut self, question: u64) {
        self.validation.asked(question);
    }

    /// True if an answer of the producer is awaited.
    pub(super) fn awaits_validation(&self) -> bool {
        self.needs_validation() && self.validation.is_asked()
    }

    /// Receives the producer's answer; false if it is not that to the load's question. If the grant does not hold, no block
    /// counts.
    pub(super) fn validation_answered(&mut self, question: u64, is_valid: bool) -> bool {
        let is_answer = self.validation.answered(question, is_valid);
        if is_answer && !is_valid {
            self.withdraw();
        }
        is_answer
    }

    /// No producer can say whether the grant still holds: no block counts that depends on it.
    pub(super) fn cannot_validate(&mut self) {
        if self.needs_validation() {
            self.withdraw();
        }
    }

    /// The session is lost, and with it an answer that was to come.
    pub(super) fn session_lost(&mut self) {
        self.validation.session_lost();
    }
}
