//! What tests of several files of the lookup buffer share.

pub(in crate::entries) mod manual;
