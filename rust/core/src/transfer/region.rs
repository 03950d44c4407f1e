//! Regions: registered memory seen as equal blocks with ids. A transfer names `(region, ids)`, never addresses;
//! bounds are checked here, and runs of ids that lie side by side on both ends become one operation.

use crate::error::{Error, Result};
use crate::ids::RegionId;
use crate::net::codec::{Reader, Writer};

/// Largest packed remote key.
pub(super) const RKEY_CAP: usize = 4096;
/// Longest name of a region.
pub(crate) const NAME_CAP: usize = 256;
/// Longest name of a device.
const DEVICE_CAP: usize = 64;

/// Most slices of a block.
pub const SLICES_CAP: u32 = 256;

/// An equal part of each block of a region, such as the KV of some of the heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slice {
    /// Its number, from 0 on.
    pub index: u32,
    /// Number of slices of a block.
    pub count: u32,
}

impl Slice {
    /// # Errors
    /// There is no such slice, or blocks are divided into too many.
    pub(crate) fn check(self) -> Result<Self> {
        let Self { index, count } = self;
        if index < count && (2..=SLICES_CAP).contains(&count) {
            return Ok(self);
        }
        Err(Error::Config(format!(
            "slice {index} of {count}: a block has 2 to {SLICES_CAP} slices, counted from 0"
        )))
    }
}

/// Division of memory into blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Number of blocks.
    pub num_blocks: u64,
    /// Bytes of one block.
    pub block_bytes: u64,
    /// Bytes from the start of a block to the start of the next.
    pub stride: u64,
    /// Bytes before the first block.
    pub skipped: u64,
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
            skipped: 0,
        })
    }

    /// The slices of these blocks, as blocks of the same memory.
    ///
    /// # Errors
    /// The bytes of a block cannot be divided so.
    pub(crate) fn sliced(&self, slice: Slice) -> Result<Self> {
        let Slice { index, count } = slice.check()?;
        let (count, index) = (u64::from(count), u64::from(index));
        if !self.block_bytes.is_multiple_of(count) {
            return Err(Error::Config(format!(
                "blocks of {} bytes cannot be divided into {count} slices",
                self.block_bytes
            )));
        }
        let block_bytes = self.block_bytes / count;
        Ok(Self {
            block_bytes,
            skipped: self.skipped + index * block_bytes,
            ..*self
        })
    }

    /// Offset of the first byte of a block.
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
        Ok(self.skipped + u64::from(id) * self.stride)
    }

    /// All of a buffer as one block.
    pub(crate) fn whole(len: u64) -> Self {
        Self {
            num_blocks: 1,
            block_bytes: len,
            stride: len,
            skipped: 0,
        }
    }
}

/// A region as its owner describes it to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Names it on its agent.
    pub id: RegionId,
    /// Its name, which its slices share.
    pub name: String,
    /// The part of each block that it is, if it is a slice.
    pub slice: Option<Slice>,
    /// Its layout.
    pub layout: Layout,
    /// Device of its memory: `cpu`, or `cuda:0` and so on.
    pub device: String,
    /// True if peers may write into it, by offers.
    pub is_writable: bool,
    /// Address of its first byte in the owner's process.
    pub base: u64,
    /// The packed key for UCX.
    pub rkey: Vec<u8>,
}

impl RemoteRegion {
    /// True if its memory is a GPU's.
    pub(crate) fn is_cuda(&self) -> bool {
        self.device.starts_with("cuda")
    }

    pub(crate) fn write(&self, writer: Writer) -> Writer {
        let Layout {
            num_blocks,
            block_bytes,
            stride,
            skipped,
        } = self.layout;
        let whole = Slice { index: 0, count: 1 };
        let Slice { index, count } = self.slice.unwrap_or(whole);
        writer
            .u32(self.id)
            .str(&self.name)
            .u32(index)
            .u32(count)
            .u64(num_blocks)
            .u64(block_bytes)
            .u64(stride)
            .u64(skipped)
            .str(&self.device)
            .u8(self.is_writable.into())
            .u64(self.base)
            .bytes(&self.rkey)
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let (id, name) = (reader.u32()?, reader.str(NAME_CAP)?);
        let (index, count) = (reader.u32()?, reader.u32()?);
        let slice = ((index, count) != (0, 1)).then_some(Slice { index, count });
        let layout = Layout {
            num_blocks: reader.u64()?,
            block_bytes: reader.u64()?,
            stride: reader.u64()?,
            skipped: reader.u64()?,
        };
        let (device, is_writable) = (reader.str(DEVICE_CAP)?, reader.flag()?);
        let (base, rkey) = (reader.u64()?, reader.bytes(RKEY_CAP)?.to_vec());
        let end = layout
            .num_blocks
            .checked_mul(layout.stride)
            .and_then(|len| base.checked_add(len))
            .and_then(|end| end.checked_add(layout.skipped));
        if end.is_none()
            || slice.is_some_and(|slice| slice.check().is_err())
            || id == RegionId::MAX
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
            slice,
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

/// A position in a list of runs.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cursor {
    /// The current run, and how much of it is behind.
    index: usize,
    in_run: u64,
    bytes_behind: u64,
}

impl Cursor {
    /// The next piece, of at most `cap` bytes.
    pub(super) fn piece(self, runs: &[Run], cap: u64) -> Option<Run> {
        let run = runs.get(self.index)?;
        Some(Run {
            to: run.to + self.in_run,
            from: run.from + self.in_run,
            len: (run.len - self.in_run).min(cap),
        })
    }

    /// Moves on by `len` bytes, all of one run.
    pub(super) fn advance(&mut self, runs: &[Run], len: u64) {
        self.in_run += len;
        self.bytes_behind += len;
        if runs
            .get(self.index)
            .is_some_and(|run| run.len == self.in_run)
        {
            (self.index, self.in_run) = (self.index + 1, 0);
        }
    }

    /// Moves on by `len` bytes, of as many runs as they are.
    pub(super) fn advance_over(&mut self, runs: &[Run], mut len: u64) {
        while len > 0
            && let Some(run) = self.piece(runs, len)
        {
            self.advance(runs, run.len);
            len -= run.len;
        }
    }

    /// Bytes of all runs that are behind.
    pub(super) fn bytes_behind(self) -> u64 {
        self.bytes_behind
    }
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
    /// Bytes that one checksum covers; the last one may cover fewer.
    pub unit_bytes: u64,
}

impl Pieces {
    /// All of a buffer, as one block whose checksums cover `unit_bytes` each.
    pub(crate) fn whole(len: u64, unit_bytes: u64) -> Self {
        Self {
            runs: vec![Run {
                to: 0,
                from: 0,
                len,
            }],
            to_ids: vec![0],
            from_ids: vec![0],
            num_bytes: len,
            unit_bytes,
        }
    }

    /// All of a buffer, to `offset` of the destination. Nothing compares checksums.
    pub(crate) fn at(offset: u64, len: u64) -> Self {
        let mut whole = Self::whole(len, len);
        whole.runs[0].to = offset;
        whole
    }

    /// Number of checksums that cover all of it.
    pub(crate) fn num_units(&self) -> u64 {
        self.num_bytes.div_ceil(self.unit_bytes)
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
    let len = to.block_bytes;
    let mut runs = Vec::new();
    for &(to_id, from_id) in &pairs {
        let (to, from) = (to.offset(to_id)?, from.offset(from_id)?);
        join(&mut runs, Run { to, from, len });
    }
    Ok(Pieces {
        runs,
        num_bytes: pairs.len() as u64 * len,
        to_ids: pairs.iter().map(|pair| pair.0).collect(),
        from_ids: pairs.iter().map(|pair| pair.1).collect(),
        unit_bytes: len,
    })
}

/// Blocks in the order in which they are named, as pieces of a sequence of bytes without gaps, which has no ids.
///
/// # Errors
/// An id is out of range.
pub(super) fn sequence(layout: &Layout, ids: &[u32]) -> Result<Pieces> {
    let len = layout.block_bytes;
    let (mut runs, mut num_bytes) = (Vec::new(), 0);
    for &id in ids {
        let (to, from) = (num_bytes, layout.offset(id)?);
        join(&mut runs, Run { to, from, len });
        num_bytes += len;
    }
    Ok(Pieces {
        runs,
        num_bytes,
        to_ids: Vec::new(),
        from_ids: Vec::new(),
        unit_bytes: len,
    })
}

/// Adds a block: to the last run if it follows on both ends.
fn join(runs: &mut Vec<Run>, block: Run) {
    match runs.last_mut() {
        Some(run) if run.to + run.len == block.to && run.from + run.len == block.from => {
            run.len += block.len;
        }
        _ => runs.push(block),
    }
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
    if let Some(two) = pairs.windows(2).find(|two| two[0].0 == two[1].0) {
        let id = two[0].0;
        let text = format!("destination block id {id} is named twice");
        return Err(Error::Config(text));
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests;
