//! One request's KV on its way from a prefill to a decode worker: two pure state machines, events in and messages
//! out, and the service that runs them on an agent. The producer announces blocks once they are ready. The consumer reads
//! them in batches. It verifies each block with the checksum that the producer computed; or asks the producer, when all
//! reads have ended, whether its grant still holds.

mod active_loads;
mod announcements;
mod api;
mod batches;
mod digests;
mod event_waiter;
mod grant_check;
mod load;
mod load_request;
mod loads;
pub(crate) mod messages;
mod producer;
mod ready;
mod service;
mod shared;
mod validation;

pub use event_waiter::DeviceEvent;
pub use load_request::{LoadCounts, LoadFailure, LoadPart, LoadRequest};
pub use ready::{ReadyBlocks, ReadyRange};
pub use shared::{Event, LoadReport};

pub(super) use event_waiter::EventWaiter;
pub(crate) use service::HandoffCommand;
pub(super) use service::HandoffService;
pub(super) use shared::HandoffShared;

use kvpipe_ucx::SharedBytes;

use crate::checksum::RunningChecksum;
use crate::ids::{Epoch, HandoffId, RegionId};

/// A block of one region (layer) that will not change any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadyBlock {
    /// The producer's region (layer) it belongs to.
    pub region: RegionId,
    /// Its place in the request: 0 is the first block of the prompt.
    pub position: u32,
    /// Its id in the producer's region.
    pub block_id: u32,
    /// Checksum of its bytes, see [`checksum`]. Without one, the block counts if the producer's grant still holds when
    /// it has been read.
    pub checksum: Option<u64>,
}

/// The checksum of a block. It covers the block's place too, so that a block of another handoff, epoch, layer or position
/// never passes for this one.
pub fn checksum(
    handoff: &HandoffId,
    epoch: Epoch,
    region: RegionId,
    position: u32,
    bytes: SharedBytes<'_>,
) -> u64 {
    let place = Places::new(handoff, epoch).at(region, position);
    checksum_at(place, bytes)
}

/// The checksums of the places of blocks of a handoff in an epoch, to which the blocks' bytes are added.
#[derive(Debug, Clone, Copy)]
struct Places(RunningChecksum);

impl Places {
    fn new(handoff: &HandoffId, epoch: Epoch) -> Self {
        let mut beginning = RunningChecksum::default();
        beginning.add(handoff[..].into());
        beginning.add_number(epoch);
        Self(beginning)
    }

    fn at(self, region: RegionId, position: u32) -> RunningChecksum {
        let Self(mut place) = self;
        place.add_number(u64::from(region) | u64::from(position) << u32::BITS);
        place
    }
}

/// The checksum of a block with these bytes at a place.
fn checksum_at(mut place: RunningChecksum, bytes: SharedBytes<'_>) -> u64 {
    place.add(bytes);
    place.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_is_that_of_place_and_bytes() {
        let place = [
            &[1; 16][..],
            &2_u64.to_le_bytes(),
            &3_u32.to_le_bytes(),
            &4_u32.to_le_bytes(),
        ];
        let all = [&place.concat()[..], b"block"].concat();
        assert_eq!(
            checksum(&[1; 16], 2, 3, 4, b"block"[..].into()),
            crate::checksum::of(&all)
        );
    }

    #[test]
    fn a_checksum_depends_on_every_part_of_its_place() {
        let (block, other) = (b"block"[..].into(), b"blocK"[..].into());
        let base = checksum(&[1; 16], 0, 0, 0, block);
        assert_eq!(base, checksum(&[1; 16], 0, 0, 0, block));
        for other in [
            checksum(&[2; 16], 0, 0, 0, block),
            checksum(&[1; 16], 1, 0, 0, block),
            checksum(&[1; 16], 0, 1, 0, block),
            checksum(&[1; 16], 0, 0, 1, block),
            checksum(&[1; 16], 0, 0, 0, other),
        ] {
            assert_ne!(base, other);
        }
    }
}
