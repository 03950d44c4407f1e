//! Content and counters of a store.

use crate::error::Result;
use crate::net::codec::{Reader, Writer};

/// Content and counters of a store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreInfo {
    /// Values that can be selected or are leased.
    pub num_values: u64,
    /// Bytes that all values and reservations count.
    pub num_bytes: u64,
    /// Limit of `num_bytes`.
    pub capacity_bytes: u64,
    /// Reservations under way.
    pub num_reserved: u64,
    /// Values that a take holds.
    pub num_leased: u64,
    /// Operations that wait for a value or for space.
    pub num_waiting: u64,
    /// Values committed so far.
    pub num_committed: u64,
    /// Values that selects and takes got.
    pub num_hits: u64,
    /// Selects and takes that got none in time.
    pub num_misses: u64,
    /// Values deleted to make space.
    pub num_evicted: u64,
    /// Reservations, leases and values that ended by time.
    pub num_expired: u64,
    /// Values whose bytes a reader found changed.
    pub num_corrupt: u64,
    /// Connected clients.
    pub num_clients: u64,
    /// Values on disk, those in memory too included.
    pub num_disk_values: u64,
    /// Bytes that these, and values that are being saved, count on disk.
    pub num_disk_bytes: u64,
    /// Limit of `num_disk_bytes`; 0 without a disk.
    pub disk_capacity_bytes: u64,
    /// Values loaded from the disk.
    pub num_loaded: u64,
    /// Saves and loads that failed.
    pub num_disk_failures: u64,
    /// Bytes of the values that were committed.
    pub committed_bytes: u64,
    /// Bytes of the values that selects and takes got.
    pub hit_bytes: u64,
    /// Operations that had to wait for a value or for space.
    pub num_waits: u64,
    /// Calls refused because their reservation or lease had ended.
    pub num_fenced: u64,
    /// Reservations, open values and leases that ended with the connection of their client.
    pub num_lost: u64,
    /// Reservations and loads refused because of the quota of their namespace.
    pub num_over_quota: u64,
}

impl StoreInfo {
    pub(super) fn fields(&mut self) -> [&mut u64; 24] {
        [
            &mut self.num_values,
            &mut self.num_bytes,
            &mut self.capacity_bytes,
            &mut self.num_reserved,
            &mut self.num_leased,
            &mut self.num_waiting,
            &mut self.num_committed,
            &mut self.num_hits,
            &mut self.num_misses,
            &mut self.num_evicted,
            &mut self.num_expired,
            &mut self.num_corrupt,
            &mut self.num_clients,
            &mut self.num_disk_values,
            &mut self.num_disk_bytes,
            &mut self.disk_capacity_bytes,
            &mut self.num_loaded,
            &mut self.num_disk_failures,
            &mut self.committed_bytes,
            &mut self.hit_bytes,
            &mut self.num_waits,
            &mut self.num_fenced,
            &mut self.num_lost,
            &mut self.num_over_quota,
        ]
    }

    pub(super) fn write(mut self, writer: Writer) -> Writer {
        let fields = self.fields().into_iter();
        fields.fold(writer, |writer, field| writer.u64(*field))
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut info = Self::default();
        for field in info.fields() {
            *field = reader.u64()?;
        }
        Ok(info)
    }
}
