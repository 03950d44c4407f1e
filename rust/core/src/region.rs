//! Regions: registered memory seen as equal blocks with ids. A transfer names `(region, ids)`, never addresses;
//! bounds are checked here, and runs of ids that lie side by side on both ends become one operation.

use crate::codec::{Reader, Writer};
use crate::error::{Error, Result};

/// Largest packed remote key.
const RKEY_CAP: usize = 4096;
/// Longest name of a region.
pub(crate) const NAME_CAP: usize = 256;
/// Longest name of a device.
const DEVICE_CAP: usize = 64;

/// How memory is cut into blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Number of blocks.
    pub num_blocks: u64,
    /// Bytes of one block.
    pub block_bytes: u64,
    /// Bytes from the start of a block to the start of the next.
    pub stride: u64,
}

impl Layout {
    /// Checks that the blocks fit into `len` bytes.
    pub fn new(len: u64, block_bytes: u64, stride: u64) -> Result<Self> {
        if block_bytes == 0 || stride < block_bytes {
            return Err(Error::Config(format!(
                "block_bytes={block_bytes} with stride={stride}: a block needs at least one byte and a stride that is not smaller"
            )));
        }
        if len < block_bytes {
            return Err(Error::Config(format!(
                "{len} bytes hold no block of {block_bytes} bytes"
            )));
        }
        let num_blocks = (len - block_bytes) / stride + 1;
        if num_blocks > u64::from(u32::MAX) {
            return Err(Error::Config(format!(
                "{num_blocks} blocks of {block_bytes} bytes: ids have 32 bits, use larger blocks"
            )));
        }
        Ok(Self {
            num_blocks,
            block_bytes,
            stride,
        })
    }

    /// Where a block begins.
    ///
    /// # Errors
    /// The id is out of range.
    pub fn offset(&self, id: u32) -> Result<u64> {
        if u64::from(id) >= self.num_blocks {
            return Err(Error::Config(format!(
                "block id {id} is out of range: the region has {} blocks",
                self.num_blocks
            )));
        }
        Ok(u64::from(id) * self.stride)
    }

    fn is_dense(&self) -> bool {
        self.stride == self.block_bytes
    }
}

/// Names a region within its agent; in the order of registration, never used again.
pub type RegionId = u32;

/// A region as its owner describes it to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Names it on its agent.
    pub id: RegionId,
    /// Its name.
    pub name: String,
    /// How it is cut.
    pub layout: Layout,
    /// Where its memory is: `cpu`.
    pub device: String,
    /// Whether peers may have their blocks taken into it.
    pub is_writable: bool,
    /// Address of its first byte in the owner's process.
    pub base: u64,
    /// The packed key for UCX.
    pub rkey: Vec<u8>,
}

impl RemoteRegion {
    pub(crate) fn write(&self, writer: Writer) -> Writer {
        let Layout {
            num_blocks,
            block_bytes,
            stride,
        } = self.layout;
        writer
            .u32(self.id)
            .str(&self.name)
            .u64(num_blocks)
            .u64(block_bytes)
            .u64(stride)
            .str(&self.device)
            .u8(self.is_writable.into())
            .u64(self.base)
            .bytes(&self.rkey)
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let (id, name) = (reader.u32()?, reader.str(NAME_CAP)?);
        let layout = Layout {
            num_blocks: reader.u64()?,
            block_bytes: reader.u64()?,
            stride: reader.u64()?,
        };
        let (device, is_writable) = (reader.str(DEVICE_CAP)?, reader.flag()?);
        let (base, rkey) = (reader.u64()?, reader.bytes(RKEY_CAP)?.to_vec());
        let end = layout
            .num_blocks
            .checked_mul(layout.stride)
            .and_then(|len| base.checked_add(len));
        if end.is_none()
            || layout.num_blocks > u64::from(u32::MAX)
            || layout.block_bytes > layout.stride
            || layout.block_bytes == 0
        {
            return Err(Error::protocol(format_args!(
                "region {name:?} has an impossible layout {layout:?}"
            )));
        }
        Ok(Self {
            id,
            name,
            layout,
            device,
            is_writable,
            base,
            rkey,
        })
    }
}

/// One contiguous piece of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Offset in the destination.
    pub to: u64,
    /// Offset in the source.
    pub from: u64,
    /// Bytes.
    pub len: u64,
}

/// The blocks of a transfer in the order of their destinations, whatever order they were named in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pieces {
    /// Contiguous pieces; blocks that lie side by side on both ends are one.
    pub runs: Vec<Run>,
    /// Destination ids.
    pub to_ids: Vec<u32>,
    /// Source ids.
    pub from_ids: Vec<u32>,
    /// Bytes of all blocks.
    pub num_bytes: u64,
}

impl Pieces {
    /// All of a buffer, which has no blocks.
    pub(crate) fn whole(len: u64) -> Self {
        Self {
            runs: vec![Run {
                to: 0,
                from: 0,
                len,
            }],
            to_ids: Vec::new(),
            from_ids: Vec::new(),
            num_bytes: len,
        }
    }
}

/// Checks and orders the blocks of a transfer.
///
/// # Errors
/// Numbers or sizes of blocks differ, an id is out of range, or a destination is named twice.
pub fn coalesce(to: (&Layout, &[u32]), from: (&Layout, &[u32])) -> Result<Pieces> {
    let ((to, to_ids), (from, from_ids)) = (to, from);
    check_sizes(to, from)?;
    let pairs = by_destination(to_ids, from_ids)?;
    let mut runs = Runs::new(to.is_dense() && from.is_dense(), to.block_bytes);
    for &(to_id, from_id) in &pairs {
        runs.add(to.offset(to_id)?, from.offset(from_id)?);
    }
    Ok(Pieces {
        runs: runs.joined,
        num_bytes: pairs.len() as u64 * to.block_bytes,
        to_ids: pairs.iter().map(|pair| pair.0).collect(),
        from_ids: pairs.iter().map(|pair| pair.1).collect(),
    })
}

/// Blocks in the order in which they are named, as pieces of a sequence of bytes without gaps.
///
/// # Errors
/// An id is out of range.
pub fn sequence(layout: &Layout, ids: &[u32]) -> Result<Vec<Run>> {
    let mut runs = Runs::new(layout.is_dense(), layout.block_bytes);
    for (&id, index) in ids.iter().zip(0..) {
        runs.add(index * layout.block_bytes, layout.offset(id)?);
    }
    Ok(runs.joined)
}

/// # Errors
/// Blocks of one do not fit the other.
pub(crate) fn check_sizes(to: &Layout, from: &Layout) -> Result<()> {
    if to.block_bytes == from.block_bytes {
        return Ok(());
    }
    Err(Error::Config(format!(
        "blocks of {} bytes cannot hold blocks of {} bytes",
        to.block_bytes, from.block_bytes
    )))
}

/// Pairs of ids by their first, which may be named once.
fn by_destination(to_ids: &[u32], from_ids: &[u32]) -> Result<Vec<(u32, u32)>> {
    if to_ids.len() != from_ids.len() {
        return Err(Error::Config(format!(
            "{} destination ids for {} source ids",
            to_ids.len(),
            from_ids.len()
        )));
    }
    let ids = to_ids.iter().copied().zip(from_ids.iter().copied());
    let mut pairs: Vec<(u32, u32)> = ids.collect();
    if !to_ids.is_sorted() {
        pairs.sort_unstable_by_key(|pair| pair.0);
    }
    let repeated = pairs.windows(2).find(|two| two[0].0 == two[1].0);
    repeated.map_or(Ok(()), |two| {
        let id = two[0].0;
        let text = format!("destination block id {id} is named twice");
        Err(Error::Config(text))
    })?;
    Ok(pairs)
}

/// Joins blocks that follow each other.
struct Runs {
    joined: Vec<Run>,
    is_dense: bool,
    block_bytes: u64,
}

impl Runs {
    fn new(is_dense: bool, block_bytes: u64) -> Self {
        Self {
            joined: Vec::new(),
            is_dense,
            block_bytes,
        }
    }

    fn add(&mut self, to: u64, from: u64) {
        let len = self.block_bytes;
        match self.joined.last_mut() {
            Some(run) if self.is_dense && run.to + run.len == to && run.from + run.len == from => {
                run.len += len;
            }
            _ => self.joined.push(Run { to, from, len }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DENSE: Layout = Layout {
        num_blocks: 100,
        block_bytes: 64,
        stride: 64,
    };
    const SPARSE: Layout = Layout {
        num_blocks: 100,
        block_bytes: 64,
        stride: 128,
    };

    fn runs(to: (&Layout, &[u32]), from: (&Layout, &[u32])) -> Vec<Run> {
        coalesce(to, from).unwrap().runs
    }

    #[test]
    fn blocks_side_by_side_on_both_ends_become_one_run() {
        let joined = [Run {
            to: 192,
            from: 640,
            len: 192,
        }];
        assert_eq!(runs((&DENSE, &[3, 4, 5]), (&DENSE, &[10, 11, 12])), joined);
        assert_eq!(runs((&DENSE, &[5, 3, 4]), (&DENSE, &[12, 10, 11])), joined);
    }

    #[test]
    fn blocks_with_gaps_stay_apart() {
        assert_eq!(runs((&SPARSE, &[0, 1]), (&DENSE, &[0, 1])).len(), 2);
        assert_eq!(sequence(&SPARSE, &[0, 1]).unwrap().len(), 2);
    }

    #[test]
    fn a_sequence_keeps_the_order_of_its_ids_and_may_repeat_them() {
        let run = |to, from, len| Run { to, from, len };
        assert_eq!(
            sequence(&DENSE, &[7, 8, 7]).unwrap(),
            [run(0, 448, 128), run(128, 448, 64)]
        );
    }

    #[test]
    fn bad_ids_are_named() {
        let text = |result: Result<Pieces>| result.unwrap_err().to_string();
        assert!(text(coalesce((&DENSE, &[100]), (&DENSE, &[0]))).contains("block id 100"));
        assert!(text(coalesce((&DENSE, &[0]), (&DENSE, &[4_000_000]))).contains("4000000"));
        assert!(
            text(coalesce((&DENSE, &[7, 8, 7]), (&DENSE, &[0, 1, 2]))).contains("7 is named twice")
        );
        assert!(text(coalesce((&DENSE, &[7]), (&DENSE, &[]))).contains("1 destination ids for 0"));
        let small = Layout::new(64, 32, 32).unwrap();
        assert!(text(coalesce((&DENSE, &[7]), (&small, &[0]))).contains("64 bytes cannot hold"));
        assert!(sequence(&DENSE, &[100]).is_err());
    }

    #[test]
    fn the_same_source_may_be_read_into_two_blocks() {
        assert_eq!(runs((&DENSE, &[1, 2]), (&DENSE, &[5, 5])).len(), 2);
    }

    #[test]
    fn a_layout_counts_the_last_block_without_its_gap() {
        assert_eq!(Layout::new(128 * 3 + 64, 64, 128).unwrap().num_blocks, 4);
        assert!(Layout::new(63, 64, 64).is_err());
        assert!(Layout::new(64, 64, 32).is_err());
    }

    fn described(
        base: u64,
        num_blocks: u64,
        block_bytes: u64,
        stride: u64,
    ) -> Result<RemoteRegion> {
        let layout = Layout {
            num_blocks,
            block_bytes,
            stride,
        };
        let region = RemoteRegion {
            id: 3,
            name: "kv".to_owned(),
            layout,
            device: "cpu".to_owned(),
            is_writable: true,
            base,
            rkey: vec![1],
        };
        let message = region.write(Writer::default()).finish();
        RemoteRegion::read(&mut Reader::new(&message))
    }

    #[test]
    fn a_region_that_cannot_exist_is_refused() {
        assert!(described(4096, 8, 64, 64).is_ok());
        assert!(described(u64::MAX - 64, 8, 64, 64).is_err());
        assert!(described(0, 8, 64, u64::MAX / 4).is_err());
        assert!(described(0, u64::from(u32::MAX) + 1, 1, 1).is_err());
        assert!(described(0, 8, 65, 64).is_err());
        assert!(described(0, 8, 0, 64).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_region_or_an_error(message: Vec<u8>) {
            let _ = RemoteRegion::read(&mut Reader::new(&message));
        }

        #[test]
        fn runs_move_exactly_the_named_blocks(pairs in proptest::collection::btree_map(0u32..100, 0u32..100, 0..50)) {
            let (to, from): (Vec<u32>, Vec<u32>) = pairs.into_iter().unzip();
            let shuffled = |ids: &[u32]| -> Vec<u32> {
                let (odd, even): (Vec<_>, Vec<_>) = ids.iter().zip(0..).partition(|(_, index)| index % 2 == 1);
                odd.into_iter().chain(even).map(|(id, _)| *id).collect()
            };
            let pieces = coalesce((&DENSE, &shuffled(&to)), (&DENSE, &shuffled(&from))).unwrap();
            prop_assert_eq!((&pieces.to_ids, &pieces.from_ids), (&to, &from));
            let moved: Vec<(u64, u64)> = pieces.runs
                .iter()
                .flat_map(|run| (0..run.len).step_by(64).map(|at| (run.to + at, run.from + at)))
                .collect();
            let named: Vec<(u64, u64)> =
                to.iter().zip(&from).map(|(&t, &f)| (u64::from(t) * 64, u64::from(f) * 64)).collect();
            prop_assert_eq!(moved, named);
        }
    }
}
