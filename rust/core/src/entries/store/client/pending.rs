//! Operations that wait for an answer of the server.

use std::sync::Arc;

use super::super::values::{OpenedValue, ValuePage};
use crate::entries::StoreInfo;
use crate::entries::messages::EntryMessage;
use crate::error::{Error, Result};
use crate::work::Completer;

/// The operation that an answer completes.
#[derive(Debug)]
pub(in super::super) enum Pending {
    Done(Completer<()>),
    Present(Completer<Vec<bool>>),
    /// Ends with the number of the reservation.
    Reserve {
        completer: Completer<Option<u64>>,
        num_bytes: u64,
    },
    Open(Completer<Option<Arc<OpenedValue>>>),
    Deleted(Completer<u64>),
    Page(Completer<ValuePage>),
    Statistics(Completer<StoreInfo>),
}

impl Pending {
    pub(super) fn fail(self, error: Error) {
        match self {
            Self::Done(completer) => completer.complete(Err(error)),
            Self::Present(completer) => completer.complete(Err(error)),
            Self::Reserve { completer, .. } => completer.complete(Err(error)),
            Self::Open(completer) => completer.complete(Err(error)),
            Self::Deleted(completer) => completer.complete(Err(error)),
            Self::Page(completer) => completer.complete(Err(error)),
            Self::Statistics(completer) => completer.complete(Err(error)),
        }
    }

    /// Completes it with the answer.
    ///
    /// # Errors
    /// `Protocol`: it is none of its answers.
    pub(super) fn complete(self, answer: EntryMessage<'_>) -> Result<()> {
        match (self, answer) {
            (Self::Done(completer), EntryMessage::Done) => completer.complete(Ok(())),
            (Self::Present(completer), EntryMessage::Present(present)) => {
                completer.complete(Ok(present));
            }
            (Self::Reserve { completer, .. }, EntryMessage::Occupied) => {
                completer.complete(Ok(None));
            }
            (Self::Open(completer), EntryMessage::Nothing) => completer.complete(Ok(None)),
            (Self::Deleted(completer), EntryMessage::Deleted(num)) => completer.complete(Ok(num)),
            (Self::Page(completer), EntryMessage::Page(page)) => {
                completer.complete(Ok(ValuePage::new(page)));
            }
            (Self::Statistics(completer), EntryMessage::Statistics(info)) => {
                completer.complete(Ok(info));
            }
            (pending, answer) => {
                let text = format_args!("message {} is no answer here", answer.kind());
                let error = Error::protocol(text);
                pending.fail(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }
}
