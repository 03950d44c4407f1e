//! Entries that wait for their readers. Their state is one for both faces: a [store] keeps one value for each key, and evicts
//! those that are unused; a [lookup buffer](lookup) lines entries up by their tokens, and delivers each once.

mod info;
pub mod lookup;
mod state;
pub mod store;

pub use info::StoreInfo;
