//! Selects of a client: asked of all its servers, answered by one.

use std::collections::HashSet;
use std::sync::Arc;

use super::super::command_queue::CommandQueue;
use super::super::messages::{CONSUME, SELECT, WITHDRAW};
use super::super::operation::{Delivery, Origin, Selected};
use super::super::transfer::{Arrived, EntryTransfer, check_seal};
use super::super::{Items, SELECTS_CAP};
use super::{LookupClient, say, settle};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::session::ReactorContext;
use crate::session::grace::{AnswerStage, GracePeriod};
use crate::transport::Payload;
use crate::work::Completer;

pub(super) struct PendingSelect {
    /// None once the caller was told.
    pub(super) completer: Option<Completer<Selected>>,
    /// For answers: the servers see to the deadline themselves, as long as they are awake.
    pub(super) grace: Option<GracePeriod>,
    /// Servers that have not answered.
    pub(super) asked: HashSet<SessionKey>,
    /// What has come, from which server; nothing more is asked of others then.
    pub(super) from: Option<SessionKey>,
    pub(super) items: Option<Items>,
    /// Nobody waits for it any more: what has come goes back.
    pub(super) is_withdrawn: bool,
}

impl LookupClient {
    pub(super) fn select(
        &mut self,
        cx: &mut ReactorContext,
        operation: u64,
        payload: &[u8],
        grace: Option<GracePeriod>,
        completer: Completer<Selected>,
    ) {
        if let Some(error) = self.obstacle() {
            return completer.complete(Err(error));
        }
        if self.selects.len() + self.delivered.len() >= SELECTS_CAP {
            let text = format!("{SELECTS_CAP} selects wait already, more are not possible");
            return completer.complete(Err(Error::Exhausted(text)));
        }
        for &session in &self.sessions {
            let header = cx.header(session, SELECT).u64(operation);
            cx.message(session, header, Payload::Bytes(payload.to_vec()));
        }
        self.looks
            .add(grace.map(|grace| grace.next(cx, &self.sessions)));
        let select = PendingSelect {
            completer: Some(completer),
            grace,
            asked: self.sessions.iter().copied().collect(),
            from: None,
            items: None,
            is_withdrawn: false,
        };
        self.selects.insert(operation, select);
    }

    pub(super) fn withdraw(&mut self, cx: &mut ReactorContext, operation: u64) {
        if self.inserts.withdraw(operation)
            && let Some(&session) = self.sessions.first()
        {
            say(cx, session, WITHDRAW, operation);
        }
        let Some(select) = self.selects.get_mut(&operation) else {
            return;
        };
        if select.from.is_some() {
            // Reads are under way, or the answer is: then it goes back.
            select.is_withdrawn = true;
            return;
        }
        for session in select.asked.drain() {
            say(cx, session, WITHDRAW, operation);
        }
        self.selects.remove(&operation);
    }

    /// The first server that offers is the one; an offer that nobody waits for was withdrawn before it came.
    pub(super) fn offer(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        operation: u64,
        mut header: Reader<'_>,
        payload: &[u8],
    ) -> Result<()> {
        let checksum = header.u64()?;
        header.end()?;
        let Some(select) = self.selects.get_mut(&operation) else {
            return Ok(());
        };
        if !select.asked.remove(&session) {
            return Ok(());
        }
        for other in select.asked.drain() {
            say(cx, other, WITHDRAW, operation);
        }
        if let Err(error) = check_seal(checksum, payload) {
            self.give_back(cx, session, operation, Err(error));
            return Ok(());
        }
        select.from = Some(session);
        let entry = EntryTransfer::read(Reader::new(payload))?;
        self.tensors.add(session, operation, entry);
        self.tensors.begin(cx, session, operation);
        Ok(())
    }

    pub(super) fn nothing(&mut self, session: SessionKey, operation: u64) {
        let Some(select) = self.selects.get_mut(&operation) else {
            return;
        };
        select.asked.remove(&session);
        if select.asked.is_empty()
            && select.from.is_none()
            && let Some(select) = self.selects.remove(&operation)
        {
            self.end(select.completer, Ok(None));
        }
    }

    pub(super) fn arrived(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        (operation, items): Arrived,
    ) {
        let Some(select) = self.selects.get_mut(&operation) else {
            return;
        };
        match items {
            Ok(items) if !select.is_withdrawn => {
                select.items = Some(items);
                say(cx, session, CONSUME, operation);
            }
            Ok(_) => self.give_back(cx, session, operation, Ok(None)),
            Err(error) => self.give_back(cx, session, operation, Err(error)),
        }
    }

    fn give_back(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        operation: u64,
        result: Result<Selected>,
    ) {
        settle(cx, session, operation, false);
        if let Some(select) = self.selects.remove(&operation) {
            self.end(select.completer, result);
        }
    }

    /// It is ours alone now.
    pub(super) fn taken(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        operation: u64,
    ) -> Result<()> {
        let is_asked =
            |select: &PendingSelect| select.from == Some(session) && select.items.is_some();
        let is_known = self.selects.get(&operation).is_some_and(is_asked);
        let known = is_known.then(|| self.selects.remove(&operation)).flatten();
        let Some(select) = known else {
            return Err(Error::protocol(format_args!(
                "select {operation} was not asked for"
            )));
        };
        let Some(items) = select.items.filter(|_| !select.is_withdrawn) else {
            settle(cx, session, operation, false);
            return Ok(());
        };
        self.delivered.insert(operation, session);
        let origin: Arc<dyn Origin> = Arc::<CommandQueue>::clone(&self.command_queue);
        let delivery = Arc::new(Delivery::new(items, operation, origin));
        self.end(select.completer, Ok(Some(delivery)));
        Ok(())
    }

    /// Ends selects whose servers are late with an answer and silent. What is on its way, goes back.
    pub(super) fn expire_selects(&mut self, cx: &mut ReactorContext) {
        if !self.looks.take_if_past(cx.now()) {
            return;
        }
        let mut ended = Vec::new();
        for (&operation, select) in &mut self.selects {
            let Some(grace) = &mut select.grace else {
                continue;
            };
            let sessions = match select.from {
                Some(session) => vec![session],
                None => select.asked.iter().copied().collect(),
            };
            match grace.look(cx, &sessions) {
                AnswerStage::Over => ended.push(operation),
                AnswerStage::InTime | AnswerStage::Late => {
                    self.looks.add(Some(grace.next(cx, &sessions)));
                }
            }
        }
        for operation in ended {
            self.end_unanswered(cx, operation);
        }
    }

    fn end_unanswered(&mut self, cx: &mut ReactorContext, operation: u64) {
        let Some(select) = self.selects.get_mut(&operation) else {
            return;
        };
        select.grace = None;
        let completer = select.completer.take();
        self.withdraw(cx, operation);
        self.end(completer, Ok(None));
    }
}
