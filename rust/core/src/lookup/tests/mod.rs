//! Tests of several files of the lookup buffer, and what such tests share.

pub(super) mod manual;
mod model;
