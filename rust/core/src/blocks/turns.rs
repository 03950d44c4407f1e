//! Work of transfers that this thread does itself, slice by slice and in turns: reads by calls of our own, and the
//! comparison of blocks with their checksums.

use super::service::Blocks;
use super::transfer::Transfer;
use crate::error::Error;
use crate::reactor::ReactorContext;

impl Transfer {
    fn has_work(&self) -> bool {
        let is_calling =
            self.process_vm.is_some() && self.cursor.piece(&self.pieces.runs, 1).is_some();
        self.failure.is_none() && (is_calling || !self.comparable().is_empty())
    }
}

impl Blocks {
    /// Queues a transfer if there is work for it.
    pub(super) fn give_turn(&mut self, id: u64) {
        if let Some(transfer) = self.transfers.get_mut(&id)
            && !transfer.has_turn
            && transfer.has_work()
        {
            transfer.has_turn = true;
            self.turns.push_back(id);
        }
    }

    /// Does a slice of the work of the transfer whose turn it is; whether there was one.
    pub(super) fn turn(&mut self, cx: &mut ReactorContext) -> bool {
        let Some(id) = self.turns.pop_front() else {
            return false;
        };
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return true; // over
        };
        transfer.has_turn = false;
        let session = transfer.session;
        // A session that has failed: its end, which is about to be reported, is that of its transfers.
        if cx.has_failed(session) {
            return true;
        }
        match transfer.call() {
            Ok(()) => transfer.compare(),
            Err(error) => {
                let error = Error::lost(&cx.peer(session), error);
                transfer.failure.get_or_insert(error.clone());
                cx.fail(session, error);
            }
        }
        self.give_turn(id);
        self.settle(cx, session, id);
        true
    }
}
