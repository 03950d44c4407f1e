//! How bytes move: the data path of a session, the layout of blocks, and streams and reads of registered memory.

pub(crate) mod advice;
pub(crate) mod cursor;
pub(crate) mod data_path;
pub(crate) mod fetch;
pub(crate) mod pool {
    pub(crate) use crate::transport::Pool;
}
pub mod region;
pub(crate) mod stream;
