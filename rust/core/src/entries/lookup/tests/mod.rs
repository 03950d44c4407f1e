//! Helpers that several test files of the lookup buffer share.

pub(in crate::entries) mod manual;
