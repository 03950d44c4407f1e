//! The request of a load, and its results.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::blocks::Region;
use crate::error::FailureCause;
use crate::ids::{HandoffId, Incarnation};
use crate::transfer::region::Slice;

/// Blocks of one group of regions (layers), which share their positions and block ids: a KV cache group.
#[derive(Debug, Clone)]
pub struct LoadPart {
    /// The regions of the group. `None`: all that the agent has.
    pub regions: Option<Vec<Region>>,
    /// Position of the first wanted block.
    pub first: u32,
    /// Destination ids, one for each position from `first` on.
    pub block_ids: Vec<u32>,
}

impl LoadPart {
    /// Blocks of all regions of the agent.
    pub fn of_all_regions(first: u32, block_ids: Vec<u32>) -> Self {
        Self {
            regions: None,
            first,
            block_ids,
        }
    }

    /// True if none of its blocks could ever arrive.
    pub(super) fn has_no_region(&self) -> bool {
        self.regions.as_ref().is_some_and(Vec::is_empty)
    }
}

/// One load: what comes from one worker of the producer of a handoff.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct LoadId {
    pub(crate) handoff: HandoffId,
    pub(crate) rank: u16,
}

impl LoadId {
    /// All loads of a handoff.
    pub(super) fn range(handoff: HandoffId) -> RangeInclusive<Self> {
        let of_rank = |rank| Self { handoff, rank };
        of_rank(0)..=of_rank(u16::MAX)
    }
}

/// A worker's load from one worker of the producer of a handoff.
#[derive(Debug, Clone, Default)]
pub struct LoadRequest {
    /// The handoff.
    pub handoff: HandoffId,
    /// Number of the producer's worker. A handoff has one load from each.
    pub rank: u16,
    /// Address of the producer's worker.
    pub producer: String,
    /// The producer's incarnation, as its scheduler named it.
    pub incarnation: Incarnation,
    /// The wanted blocks. Those of several parts are of use together only: if one is lost, so is the load.
    pub parts: Vec<LoadPart>,
    /// The slice of the blocks here that it fills; `None`: all of them.
    pub destination_slice: Option<Slice>,
    /// The slice of the producer's blocks that it reads; `None`: all of them. The producer divides its blocks for the first
    /// such load.
    pub source_slice: Option<Slice>,
    /// True if other workers load from the producer's, too: it is not sent ACK, and its scheduler ends the handoff.
    pub is_shared: bool,
    /// True if the sequence state is here: the load then ends with its last block.
    pub is_committed: bool,
}

impl LoadRequest {
    pub(crate) fn id(&self) -> LoadId {
        LoadId {
            handoff: self.handoff,
            rank: self.rank,
        }
    }
}

/// Counters of a load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadCounts {
    /// Bytes that were read.
    pub num_bytes: u64,
    /// Blocks that are verified in every region.
    pub num_received: u64,
    /// Blocks that are not.
    pub num_missing: u64,
    /// Blocks that were read again in some region.
    pub num_retried: u64,
    /// Blocks without checksums whose grant still held when they had been read, as the producer has answered; one for each
    /// block and region.
    pub num_validated: u64,
    /// Comparisons with the producer's checksums, one for each block and region that was read and has one.
    pub num_compared: u64,
    /// Comparisons that differed.
    pub num_corrupt: u64,
    /// Time from the first announcement until everything announced so far was here. Later blocks overlap with prefill.
    pub backlog: Duration,
}

/// Reason for the failure of a load, and its missing blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadFailure {
    /// Indices into the `block_ids` of the load's parts, one part after the other, of the blocks that are not verified.
    pub missing: Vec<u32>,
    /// The first failure.
    pub reason: String,
    /// The kind of it.
    pub cause: FailureCause,
}
