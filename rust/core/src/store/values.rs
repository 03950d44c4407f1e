//! Values as callers of a client see them.

#[cfg(doc)]
use super::StoreClient;
use super::messages::{Carried, Page};

/// A value that a client may read, until it [releases](StoreClient::release) the operation.
#[derive(Debug)]
pub struct OpenedValue {
    /// The select or take that holds it.
    pub operation: u64,
    /// Size of its bytes.
    pub num_bytes: u64,
    /// What was committed with them.
    pub record: Vec<u8>,
    pub(super) checksum: u64,
    pub(super) bytes: Carried<'static>,
}

impl OpenedValue {
    pub(super) fn new(operation: u64, checksum: u64, record: &[u8], bytes: Carried<'_>) -> Self {
        Self {
            operation,
            num_bytes: bytes.len(),
            record: record.to_vec(),
            checksum,
            bytes: bytes.into_owned(),
        }
    }
}

/// A value in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedValue {
    /// Its name.
    pub key: Vec<u8>,
    /// Size of its bytes.
    pub num_bytes: u64,
    /// Whether a take holds it.
    pub is_leased: bool,
}

/// A part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValuePage {
    /// Some of the values.
    pub values: Vec<ListedValue>,
    /// After which value the next page begins; `None` at the end.
    pub next: Option<u64>,
}

impl ValuePage {
    pub(super) fn new(page: Page) -> Self {
        let values = page.values.into_iter().map(|value| ListedValue {
            key: value.key.to_vec(),
            num_bytes: value.num_bytes,
            is_leased: value.is_leased,
        });
        Self {
            values: values.collect(),
            next: page.next,
        }
    }
}
