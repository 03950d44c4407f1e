//! What tests of several files of the lookup buffer share.

pub(super) mod manual;
