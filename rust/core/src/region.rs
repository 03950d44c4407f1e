//! Regions: registered memory seen as equal blocks with ids. A transfer names `(region, ids)`, never addresses;
//! bounds are checked here, and runs of ids that lie side by side on both ends become one operation.

use crate::codec::{Reader, Writer};
use crate::error::{Error, Result};

/// Largest packed remote key.
const RKEY_CAP: usize = 4096;
/// Longest name of a region.
pub(crate) const NAME_CAP: usize = 256;

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

/// A region as its owner describes it to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Its name.
    pub name: String,
    /// How it is cut.
    pub layout: Layout,
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
            .str(&self.name)
            .u64(num_blocks)
            .u64(block_bytes)
            .u64(stride)
            .u64(self.base)
            .bytes(&self.rkey)
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let name = reader.str(NAME_CAP)?;
        let layout = Layout {
            num_blocks: reader.u64()?,
            block_bytes: reader.u64()?,
            stride: reader.u64()?,
        };
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
            name,
            layout,
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

/// Turns pairs of block ids into contiguous runs of at most `cap` bytes (or one block, if that is larger).
///
/// # Errors
/// Numbers or sizes of blocks differ, an id is out of range, or a destination is named twice.
pub fn coalesce(to: (&Layout, &[u32]), from: (&Layout, &[u32]), cap: u64) -> Result<Vec<Run>> {
    let ((to, to_ids), (from, from_ids)) = (to, from);
    if to_ids.len() != from_ids.len() {
        let text = format!(
            "{} destination ids for {} source ids",
            to_ids.len(),
            from_ids.len()
        );
        return Err(Error::Config(text));
    }
    if to.block_bytes != from.block_bytes {
        let text = format!(
            "blocks of {} bytes cannot hold blocks of {} bytes",
            to.block_bytes, from.block_bytes
        );
        return Err(Error::Config(text));
    }
    if let Some(id) = repeated(to_ids) {
        return Err(Error::Config(format!(
            "destination block id {id} is named twice"
        )));
    }
    let is_dense = to.is_dense() && from.is_dense();
    let mut runs: Vec<Run> = Vec::new();
    for (&to_id, &from_id) in to_ids.iter().zip(from_ids) {
        let (at, source, len) = (to.offset(to_id)?, from.offset(from_id)?, to.block_bytes);
        match runs.last_mut() {
            Some(run)
                if is_dense
                    && run.to + run.len == at
                    && run.from + run.len == source
                    && run.len + len <= cap =>
            {
                run.len += len;
            }
            _ => runs.push(Run {
                to: at,
                from: source,
                len,
            }),
        }
    }
    Ok(runs)
}

fn repeated(ids: &[u32]) -> Option<u32> {
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    sorted
        .windows(2)
        .find(|pair| pair[0] == pair[1])
        .map(|pair| pair[0])
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

    #[test]
    fn blocks_side_by_side_on_both_ends_become_one_run() {
        let runs = coalesce((&DENSE, &[3, 4, 5]), (&DENSE, &[10, 11, 12]), 1 << 20).unwrap();
        assert_eq!(
            runs,
            [Run {
                to: 192,
                from: 640,
                len: 192
            }]
        );
    }

    #[test]
    fn a_run_ends_at_the_cap() {
        let runs = coalesce((&DENSE, &[0, 1, 2]), (&DENSE, &[0, 1, 2]), 128).unwrap();
        assert_eq!(
            runs.iter().map(|run| run.len).collect::<Vec<_>>(),
            [128, 64]
        );
    }

    #[test]
    fn blocks_with_gaps_stay_apart() {
        assert_eq!(
            coalesce((&SPARSE, &[0, 1]), (&DENSE, &[0, 1]), 1 << 20)
                .unwrap()
                .len(),
            2
        );
    }

    #[test]
    fn bad_ids_are_named() {
        let text = |result: Result<Vec<Run>>| result.unwrap_err().to_string();
        assert!(text(coalesce((&DENSE, &[100]), (&DENSE, &[0]), 1)).contains("block id 100"));
        assert!(text(coalesce((&DENSE, &[0]), (&DENSE, &[4_000_000]), 1)).contains("4000000"));
        assert!(
            text(coalesce((&DENSE, &[7, 8, 7]), (&DENSE, &[0, 1, 2]), 1))
                .contains("7 is named twice")
        );
        assert!(
            text(coalesce((&DENSE, &[7]), (&DENSE, &[]), 1)).contains("1 destination ids for 0")
        );
    }

    #[test]
    fn the_same_source_may_be_read_into_two_blocks() {
        assert_eq!(
            coalesce((&DENSE, &[1, 2]), (&DENSE, &[5, 5]), 1 << 20)
                .unwrap()
                .len(),
            2
        );
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
            name: "kv".to_owned(),
            layout,
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
            let runs = coalesce((&DENSE, &to), (&DENSE, &from), 256).unwrap();
            let moved: Vec<(u64, u64)> = runs
                .iter()
                .flat_map(|run| (0..run.len).step_by(64).map(|at| (run.to + at, run.from + at)))
                .collect();
            let named: Vec<(u64, u64)> =
                to.iter().zip(&from).map(|(&t, &f)| (u64::from(t) * 64, u64::from(f) * 64)).collect();
            prop_assert_eq!(moved, named);
        }
    }
}
