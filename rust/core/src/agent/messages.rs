//! Messages of an agent besides those of transfers; see docs/reference/wire-agent.md.

use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};

use super::notices::TAG_CAP;
use crate::ids::RegionId;
use crate::transfer::message::{BLOCKS_CAP, REASON_CAP};
use crate::transfer::region::{Pieces, RemoteRegion};

/// Writer offers blocks: offer, target's region, writer's region, whether checksums are wanted, 1 and a number if it has
/// a tag, else 0; payload: the target's ids, the writer's ids, the tag.
pub(super) const OFFER: u8 = 36;
/// Target has an offer's blocks: offer.
pub(super) const ACCEPTED: u8 = 37;
/// Target does not take an offer, whose number is void: offer; payload: reason.
pub(super) const DECLINED: u8 = 38;
/// Target got blocks that differ from their checksums; as [`DECLINED`].
pub(super) const CORRUPT: u8 = 39;
/// A notification: number; payload: tag.
pub(super) const NOTIFY: u8 = 40;
/// A number whose transfer failed: number.
pub(super) const VOID: u8 = 41;
/// Receiver has all numbers before one, its user has taken all before another.
pub(super) const NOTED: u8 = 42;

/// Frame over TCP: the regions of the sender, all of them, in the order of their indices.
///
/// A region that was in the frame before and is not any more has been closed.
pub(super) const REGIONS: u8 = 1;
/// Frame over TCP: nothing of this region, which the receiver has closed, is being read any more.
pub(super) const RELEASED: u8 = 2;
/// Where a process on this machine can read ours: its id, and an address with 16 random bytes.
pub(super) const PROCESS_VM: u8 = 3;

/// Most regions of an agent.
pub(super) const REGIONS_CAP: usize = 4096;

pub(crate) fn regions(regions: &[RemoteRegion]) -> Vec<u8> {
    Writer::new(REGIONS)
        .list(regions, |writer, region| region.write(writer))
        .finish()
}

/// What a peer says in [`REGIONS`].
pub(crate) struct RemoteRegions(pub(crate) Vec<RemoteRegion>);

impl RemoteRegions {
    /// Reads what follows the type.
    pub(crate) fn read(mut reader: Reader<'_>) -> Result<Self> {
        let regions = reader.list(REGIONS_CAP, RemoteRegion::read)?;
        reader.end()?;
        if !regions.is_sorted_by(|a, b| a.id < b.id) {
            return Err(Error::protocol("regions out of order"));
        }
        Ok(Self(regions))
    }
}

/// Blocks that a writer offers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Offered {
    pub(crate) offer: u64,
    /// On the target.
    pub(crate) to: RegionId,
    /// On the writer.
    pub(crate) from: RegionId,
    pub(crate) to_ids: Vec<u32>,
    pub(crate) from_ids: Vec<u32>,
    pub(crate) is_checksummed: bool,
    /// Number and content of its notification.
    pub(crate) notice: Option<(u64, Vec<u8>)>,
}

impl Offered {
    /// Continues a header, and makes the payload.
    pub(crate) fn write(
        header: Writer,
        (offer, to, from): (u64, RegionId, RegionId),
        pieces: &Pieces,
        is_checksummed: bool,
        notice: Option<(u64, &[u8])>,
    ) -> (Writer, Vec<u8>) {
        let header = header
            .u64(offer)
            .u32(to)
            .u32(from)
            .u8(is_checksummed.into());
        let (header, tag) = match notice {
            Some((number, tag)) => (header.u8(1).u64(number), tag),
            None => (header.u8(0), &[][..]),
        };
        let payload = Writer::default()
            .list(&pieces.to_ids, |w, id| w.u32(*id))
            .list(&pieces.from_ids, |w, id| w.u32(*id))
            .bytes(tag);
        (header, payload.finish())
    }

    pub(crate) fn read(mut header: Reader<'_>, payload: &[u8]) -> Result<Self> {
        let (offer, to, from) = (header.u64()?, header.u32()?, header.u32()?);
        let is_checksummed = header.flag()?;
        let number = header.flag()?.then(|| header.u64()).transpose()?;
        header.end()?;
        let mut reader = Reader::new(payload);
        let to_ids = reader.list(BLOCKS_CAP, Reader::u32)?;
        let from_ids = reader.list(BLOCKS_CAP, Reader::u32)?;
        let tag = reader.bytes(TAG_CAP)?.to_vec();
        reader.end()?;
        if number.is_none() && !tag.is_empty() {
            return Err(Error::protocol("an offer with a tag that has no number"));
        }
        Ok(Self {
            offer,
            to,
            from,
            to_ids,
            from_ids,
            is_checksummed,
            notice: number.map(|number| (number, tag)),
        })
    }
}

pub(crate) fn reason(payload: &[u8]) -> Result<String> {
    let mut reader = Reader::new(payload);
    let reason = reader.str(REASON_CAP)?;
    reader.end()?;
    Ok(reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_payload_gives_a_value_or_an_error(payload: Vec<u8>) {
            let _ = reason(&payload);
            let _ = Offered::read(Reader::new(&payload), &payload);
            let _ = RemoteRegions::read(Reader::new(&payload));
        }

        #[test]
        fn an_offer_is_read_back(ids: Vec<(u32, u32)>, is_checksummed: bool, notice: Option<(u64, Vec<u8>)>) {
            let (to_ids, from_ids): (Vec<u32>, Vec<u32>) = ids.into_iter().unzip();
            let offered = Offered { offer: 1, to: 2, from: 3, to_ids, from_ids, is_checksummed, notice };
            let pieces = Pieces {
                runs: Vec::new(),
                to_ids: offered.to_ids.clone(),
                from_ids: offered.from_ids.clone(),
                num_bytes: 0,
                unit_bytes: 1,
            };
            let notice = offered.notice.as_ref().map(|(number, tag)| (*number, &tag[..]));
            let (header, payload) = Offered::write(Writer::default(), (1, 2, 3), &pieces, is_checksummed, notice);
            prop_assert_eq!(Offered::read(Reader::new(&header.finish()), &payload).unwrap(), offered);
        }

        #[test]
        fn a_tag_without_a_number_is_an_error(tag: u8) {
            let header = Writer::default().u64(1).u32(2).u32(3).u8(1).u8(0).finish();
            let payload = Writer::default().u32(0).u32(0).bytes(&[tag]).finish();
            prop_assert!(Offered::read(Reader::new(&header), &payload).is_err());
        }
    }
}
