//! Jobs of the server for its disk, and their reports.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::content::Content;
use super::super::disk::{Disk, DiskReport};
use super::super::messages::StoreMessage;
use super::Server;
use super::arrival::Allocated;
use super::arrivals::allocate;
use crate::clock;
use crate::entries::state::{EntryId, Holder};
use crate::error::{Error, Result};
use crate::transfer::Cx;

pub(super) struct DiskJobs {
    pub(super) disk: Disk,
    /// Memory of values that are being loaded.
    loads: HashMap<EntryId, Allocated>,
    /// Answers that wait until what was deleted is erased.
    answers: HashMap<u64, (Holder, StoreMessage<'static>)>,
    next_token: u64,
}

impl DiskJobs {
    pub(super) fn new(disk: Disk) -> Self {
        Self {
            disk,
            loads: HashMap::new(),
            answers: HashMap::new(),
            next_token: 0,
        }
    }

    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("loads from disk", self.loads.len()),
            ("answers that wait for the disk", self.answers.len()),
            ("reports of the disk", self.disk.reports.len()),
        ]
    }
}

impl Server {
    pub(super) fn begin_load(&mut self, cx: &mut Cx<'_>, id: EntryId, num_bytes: u64) {
        let allocated = allocate(cx, num_bytes);
        let Some(jobs) = &mut self.disk else { return };
        match allocated {
            Ok(allocated) => {
                jobs.disk.load(id, allocated.buffer.clone());
                jobs.loads.insert(id, allocated);
            }
            Err(error) => self.state.loaded(id, Err(error), clock::now()),
        }
    }

    /// Answers; where a kill could bring a deleted value back, when its erasure is durable.
    pub(super) fn answer_erased(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): Holder,
        answer: StoreMessage<'static>,
        is_on_disk: bool,
    ) {
        // The erasures are sent first.
        self.run_actions(cx);
        match &mut self.disk {
            Some(jobs) if is_on_disk => {
                jobs.next_token += 1;
                let token = jobs.next_token;
                jobs.answers.insert(token, ((session, operation), answer));
                jobs.disk.sync(token);
            }
            _ => answer.send(cx.links, session, operation),
        }
    }

    /// Handles what the disk has done; whether there was anything.
    pub(super) fn run_disk_reports(&mut self, cx: &mut Cx<'_>) -> bool {
        let mut has_run = false;
        while let Some(jobs) = &mut self.disk
            && let Some(report) = jobs.disk.reports.next()
        {
            has_run = true;
            match report {
                DiskReport::Saved(id, is_kept) => self.state.saved(id, is_kept, clock::now()),
                DiskReport::Erased(id) => self.state.erased(id),
                DiskReport::Loaded(id, outcome) => {
                    let allocated = jobs.loads.remove(&id);
                    let content = outcome.and_then(|found| content(allocated, found));
                    if let Err(error) = &content {
                        tracing::warn!(%error, id, "store.load_failed");
                    }
                    self.state.loaded(id, content, clock::now());
                }
                DiskReport::Synced(token, outcome) => {
                    if let Some(((session, operation), answer)) = jobs.answers.remove(&token) {
                        let answer = outcome.map_or_else(StoreMessage::Refused, |()| answer);
                        answer.send(cx.links, session, operation);
                    }
                }
            }
            self.run_actions(cx);
        }
        has_run
    }

    /// Saves what is in memory alone: the disk's threads do it after the reactor has ended.
    pub(super) fn save_rest(&mut self, cx: &mut Cx<'_>) {
        // Erasures of the last rounds are behind it.
        let num_values = self.state.save_all();
        if num_values > 0 {
            tracing::info!(num_values, "store.saving");
        }
        self.run_actions(cx);
    }
}

fn content(
    allocated: Option<Allocated>,
    (record, checksum): (Box<[u8]>, u64),
) -> Result<Arc<Content>> {
    let lost = || Error::Unavailable("nobody loads this value".to_owned());
    let Allocated { buffer, memory } = allocated.ok_or_else(lost)?;
    Ok(Arc::new(Content {
        buffer,
        memory,
        record,
        checksum,
    }))
}
