//! Jobs of a store for its disk, and their reports.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::content::{Content, Description, Part};
use super::super::disk::{Disk, DiskReport};
use super::super::messages::EntryMessage;
use super::super::state::{EntryId, Holder};
use super::Server;
use super::arrivals::allocate;
use crate::clock;
use crate::error::{Error, Result};
use crate::transfer::Cx;

pub(super) struct DiskJobs {
    pub(super) disk: Disk,
    /// Memory of values that are being loaded.
    loads: HashMap<EntryId, Part>,
    /// Answers that wait until what was deleted is erased.
    answers: HashMap<u64, (Holder, EntryMessage<'static>)>,
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
            Ok(part) => {
                jobs.disk.load(id, part.buffer.clone());
                jobs.loads.insert(id, part);
            }
            Err(error) => self.loaded(id, Err(error)),
        }
    }

    fn loaded(&self, id: EntryId, content: Result<Arc<Content>>) {
        let now = clock::now();
        let _ = self.change(|state| state.entries.loaded(id, content, now));
    }

    /// Answers; where a kill could bring a deleted value back, when its erasure is durable.
    pub(super) fn answer_erased(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): Holder,
        answer: EntryMessage<'static>,
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

    /// Handles what the disk has done; false if there was nothing.
    pub(super) fn run_disk_reports(&mut self, cx: &mut Cx<'_>) -> bool {
        let mut has_run = false;
        while let Some(jobs) = &mut self.disk
            && let Some(report) = jobs.disk.reports.next()
        {
            has_run = true;
            match report {
                DiskReport::Saved(id, is_kept) => {
                    let now = clock::now();
                    let _ = self.change(|state| state.entries.saved(id, is_kept, now));
                }
                DiskReport::Erased(id) => {
                    let _ = self.change(|state| state.entries.erased(id));
                }
                DiskReport::Loaded(id, outcome) => {
                    let part = jobs.loads.remove(&id);
                    let content = outcome.and_then(|found| content(part, found));
                    if let Err(error) = &content {
                        tracing::warn!(%error, id, "store.load_failed");
                    }
                    self.loaded(id, content);
                }
                DiskReport::Synced(token, outcome) => {
                    if let Some(((session, operation), answer)) = jobs.answers.remove(&token) {
                        let answer = outcome.map_or_else(EntryMessage::Refused, |()| answer);
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
        let saved = self.change(|state| state.entries.save_all());
        let num_values = saved.unwrap_or_default();
        if num_values > 0 {
            tracing::info!(num_values, "store.saving");
        }
        self.run_actions(cx);
    }
}

fn content(part: Option<Part>, (record, checksum): (Box<[u8]>, u64)) -> Result<Arc<Content>> {
    let lost = || Error::Unavailable("the value is not being loaded any more".to_owned());
    Ok(Arc::new(Content {
        parts: vec![part.ok_or_else(lost)?],
        description: Description::Record(record),
        checksum: Some(checksum),
    }))
}
