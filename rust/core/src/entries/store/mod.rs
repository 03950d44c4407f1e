//! A memory server for values of KV, and its client. A [`StoreServer`] keeps values by their keys; a [`StoreClient`] reserves,
//! writes, commits, selects and takes them. What the operations mean is `kvpipe.store.KVStore`.

mod api;
mod client;
mod values;

pub use api::{DiskConfig, StoreClient, StoreServer};
pub use values::{ListedValue, OpenedValue, ValuePage};
