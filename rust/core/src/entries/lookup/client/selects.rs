//! A client's selects: each is sent to all servers, and gets its entry from the first that offers one.

use std::collections::HashSet;
use std::sync::Arc;

use super::super::command_queue::QueuedSelect;
use super::super::operation::{Delivery, Origin, Selected};
use super::super::{Items, SELECTS_CAP};
use super::LookupClient;
use crate::entries::messages::{Carried, EntryMessage};
use crate::entries::state::Access;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::grace::{AnswerStage, GracePeriod};
use crate::transfer::Cx;
use crate::work::Completer;

#[derive(Debug)]
pub(super) enum SelectStage {
    /// These servers have not answered.
    Asking(HashSet<SessionKey>),
    /// This server offers an entry, whose tensors are being fetched.
    Fetching(SessionKey),
    /// The entry is here, and its server was asked for it.
    Consuming(SessionKey, Items),
}

pub(super) struct PendingSelect {
    stage: SelectStage,
    /// The server keeps the entry, which goes back when it is here.
    is_peek: bool,
    /// `None` once the operation has ended for its caller.
    pub(super) completer: Option<Completer<Selected>>,
    /// For the answers. While the servers answer probes, they enforce the deadline.
    grace: Option<GracePeriod>,
    /// The caller has withdrawn: an entry on its way goes back.
    is_withdrawn: bool,
}

impl PendingSelect {
    /// Marks a server as answered; false if it has answered before, or another server has offered an entry.
    fn mark_answered(&mut self, session: SessionKey) -> bool {
        match &mut self.stage {
            SelectStage::Asking(servers) => servers.remove(&session),
            SelectStage::Fetching(_) | SelectStage::Consuming(..) => false,
        }
    }

    /// The servers that have not answered.
    fn drain_asked(&mut self) -> Vec<SessionKey> {
        match &mut self.stage {
            SelectStage::Asking(servers) => servers.drain().collect(),
            SelectStage::Fetching(_) | SelectStage::Consuming(..) => Vec::new(),
        }
    }

    /// True if its entry is here, and this server was asked for it.
    fn is_consuming_from(&self, session: SessionKey) -> bool {
        matches!(self.stage, SelectStage::Consuming(from, _) if from == session)
    }

    /// The servers from which something is to come.
    fn servers(&self) -> Vec<SessionKey> {
        match &self.stage {
            SelectStage::Asking(servers) => servers.iter().copied().collect(),
            SelectStage::Fetching(session) | SelectStage::Consuming(session, _) => vec![*session],
        }
    }
}

impl LookupClient {
    pub(super) fn select(&mut self, cx: &mut Cx<'_>, select: QueuedSelect) {
        let QueuedSelect {
            operation,
            query,
            timeout,
            is_peek,
            completer,
        } = select;
        if let Err(error) = self.check_usable() {
            return completer.complete(Err(error));
        }
        if self.selects.len() + self.delivered.len() >= SELECTS_CAP {
            let text = format!(
                "{SELECTS_CAP} selects wait, or have entries that their callers have not received; more are not possible"
            );
            return completer.complete(Err(Error::Exhausted(text)));
        }
        let query = query.to_query();
        for &session in &self.sessions {
            let select = EntryMessage::Select {
                query: query.as_borrowed(),
                access: Access::Lease(None),
                timeout,
            };
            select.send(cx.links, session, operation);
        }
        let grace =
            timeout.map(|timeout| GracePeriod::new(cx.links.now(), cx.links.now() + timeout));
        self.next_looks
            .add(grace.map(|grace| grace.next(cx.links, &self.sessions)));
        let select = PendingSelect {
            stage: SelectStage::Asking(self.sessions.iter().copied().collect()),
            is_peek,
            completer: Some(completer),
            grace,
            is_withdrawn: false,
        };
        self.selects.insert(operation, select);
    }

    pub(super) fn withdraw(&mut self, cx: &mut Cx<'_>, operation: u64) {
        self.withdraw_insert(cx, operation);
        let Some(select) = self.selects.get_mut(&operation) else {
            return;
        };
        if matches!(select.stage, SelectStage::Asking(_)) {
            let asked = select.drain_asked();
            self.selects.remove(&operation);
            self.withdraw_from(cx, asked, operation);
        } else {
            // The entry goes back when it is here: its reads are under way, or the server's answer is.
            select.is_withdrawn = true;
        }
    }

    /// Withdraws a select from servers that have not answered.
    fn withdraw_from(&self, cx: &mut Cx<'_>, asked: Vec<SessionKey>, operation: u64) {
        for session in asked {
            self.settle(cx, (session, operation), false);
        }
    }

    pub(super) fn select_refused(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        operation: u64,
        error: Error,
    ) {
        let Some(select) = self.selects.get_mut(&operation) else {
            return;
        };
        // Otherwise another server has offered an entry while this refusal was on its way.
        if select.mark_answered(session) || select.is_consuming_from(session) {
            let asked = select.drain_asked();
            self.withdraw_from(cx, asked, operation);
            self.end_select(operation, Err(error));
        }
    }

    /// Receives an offer. One for a withdrawn select was on its way, and its server takes the entry back.
    pub(super) fn offer(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        operation: u64,
        entry: Result<(&[u8], Vec<Carried<'_>>)>,
    ) -> Result<()> {
        let Some(select) = self.selects.get_mut(&operation) else {
            return Ok(());
        };
        if !select.mark_answered(session) {
            return Ok(());
        }
        let asked = select.drain_asked();
        select.stage = SelectStage::Fetching(session);
        self.withdraw_from(cx, asked, operation);
        match entry {
            Ok((record, parts)) => self.fetch(cx, (session, operation), record, parts),
            Err(error) => {
                self.return_entry(cx, session, operation, Err(error));
                Ok(())
            }
        }
    }

    pub(super) fn nothing(&mut self, session: SessionKey, operation: u64) {
        if let Some(select) = self.selects.get_mut(&operation)
            && select.mark_answered(session)
            && select.servers().is_empty()
        {
            self.end_select(operation, Ok(None));
        }
    }

    pub(super) fn arrived(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        operation: u64,
        items: Result<Items>,
    ) {
        let Some(select) = self.selects.get_mut(&operation) else {
            return;
        };
        match items {
            Ok(_) if select.is_withdrawn => self.return_entry(cx, session, operation, Ok(None)),
            Ok(items) if select.is_peek => {
                let delivery = Arc::new(Delivery::returned(items));
                self.return_entry(cx, session, operation, Ok(Some(delivery)));
            }
            Ok(items) => {
                select.stage = SelectStage::Consuming(session, items);
                EntryMessage::Consume.send(cx.links, session, operation);
            }
            Err(error) => self.return_entry(cx, session, operation, Err(error)),
        }
    }

    fn return_entry(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        operation: u64,
        result: Result<Selected>,
    ) {
        self.settle(cx, (session, operation), false);
        self.end_select(operation, result);
    }

    fn end_select(&mut self, operation: u64, result: Result<Selected>) {
        if let Some(select) = self.selects.remove(&operation) {
            self.end(select.completer, result);
        }
    }

    /// The entry belongs to this client alone.
    pub(super) fn consumed(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        operation: u64,
    ) -> Result<()> {
        let is_asked = |select: &PendingSelect| select.is_consuming_from(session);
        let is_known = self.selects.get(&operation).is_some_and(is_asked);
        let select = is_known.then(|| self.selects.remove(&operation)).flatten();
        let Some(PendingSelect {
            stage: SelectStage::Consuming(_, items),
            completer,
            is_withdrawn,
            ..
        }) = select
        else {
            let text = format_args!("an answer to operation {operation}, which waits for none");
            return Err(Error::protocol(text));
        };
        if is_withdrawn {
            self.settle(cx, (session, operation), false);
            return Ok(());
        }
        self.delivered.insert(operation, session);
        let origin = Origin::Remote(Arc::clone(&self.command_queue));
        let delivery = Arc::new(Delivery::new(items, operation, origin));
        self.end(completer, Ok(Some(delivery)));
        Ok(())
    }

    /// Ends selects whose grace period is over. An entry on its way goes back.
    pub(super) fn expire_selects(&mut self, cx: &mut Cx<'_>) {
        if !self.next_looks.clear_if_past(cx.links.now()) {
            return;
        }
        let mut ended = Vec::new();
        for (&operation, select) in &mut self.selects {
            let sessions = select.servers();
            let Some(grace) = &mut select.grace else {
                continue;
            };
            match grace.look(cx.links, &sessions) {
                AnswerStage::Overdue => ended.push(operation),
                AnswerStage::InTime | AnswerStage::Late => {
                    self.next_looks.add(Some(grace.next(cx.links, &sessions)));
                }
            }
        }
        for operation in ended {
            self.end_unanswered(cx, operation);
        }
    }

    /// Ends a select for its caller. An entry that is on its way goes back when it is here.
    fn end_unanswered(&mut self, cx: &mut Cx<'_>, operation: u64) {
        let Some(select) = self.selects.get_mut(&operation) else {
            return;
        };
        select.grace = None;
        let completer = select.completer.take();
        self.withdraw(cx, operation);
        self.end(completer, Ok(None));
    }
}
