//! Kinds of frames and messages, as in docs/reference/wire-*.md.

/// The bootstrap.
pub(crate) mod bootstrap {
    pub(crate) const HELLO: u8 = 1;
    pub(crate) const REPLY: u8 = 2;
    pub(crate) const IDENTITY: u8 = 4;
    pub(crate) const REFUSED: u8 = 7;
    pub(crate) const JOIN: u8 = 8;
}

/// Frames of every session.
pub(crate) mod session {
    pub(crate) const HEARTBEAT: u8 = 32;
    pub(crate) const MESSAGE: u8 = 33;
    pub(crate) const GOODBYE: u8 = 34;
    pub(crate) const STREAM: u8 = 37;
    pub(crate) const STREAM_LOST: u8 = 38;
}

/// Transfers of blocks and of large tensors.
pub(crate) mod transfer {
    pub(crate) const READ: u8 = 32;
    pub(crate) const DATA: u8 = 33;
    pub(crate) const CREDIT: u8 = 34;
    pub(crate) const REFUSED: u8 = 35;
    pub(crate) const CHECKSUMS: u8 = 43;
    pub(crate) const SOURCE_CHECKSUMS: u8 = 44;
    pub(crate) const CANCEL: u8 = 45;
    pub(crate) const CANCELLED: u8 = 46;
}

pub(crate) mod pipe {
    pub(crate) const EAGER: u8 = 1;
    pub(crate) const OFFER: u8 = 2;
    pub(crate) const ACK: u8 = 6;
    pub(crate) const WITHDRAW: u8 = 7;
    pub(crate) const WITHDRAWN: u8 = 8;
    pub(crate) const CORRUPT: u8 = 10;
    pub(crate) const VALIDATE: u8 = 12;
    pub(crate) const VALID: u8 = 13;
    pub(crate) const INVALID: u8 = 14;
    pub(crate) const END: u8 = 15;
}

/// Entries of a lookup buffer and values of a store.
pub(crate) mod entries {
    pub(crate) const EXISTS: u8 = 64;
    pub(crate) const WRITE: u8 = 66;
    pub(crate) const PUT: u8 = 68;
    pub(crate) const SELECT: u8 = 70;
    pub(crate) const RELEASE: u8 = 72;
    pub(crate) const RENEW: u8 = 73;
    pub(crate) const ACKNOWLEDGE: u8 = 74;
    pub(crate) const LIST: u8 = 77;
    pub(crate) const CONSUME: u8 = 79;
    pub(crate) const DONE: u8 = 80;
    pub(crate) const REFUSED: u8 = 81;
    pub(crate) const PRESENT: u8 = 82;
    pub(crate) const OFFER: u8 = 85;
    pub(crate) const NOTHING: u8 = 86;
    pub(crate) const PAGE: u8 = 88;
    pub(crate) const STATISTICS: u8 = 89;
    pub(crate) const CANCEL: u8 = 91;
}

pub(crate) mod agent {
    pub(crate) const REGIONS: u8 = 1;
    pub(crate) const RELEASED: u8 = 2;
    pub(crate) const DIVIDE: u8 = 3;
    pub(crate) const OFFER: u8 = 36;
    pub(crate) const ACCEPTED: u8 = 37;
    pub(crate) const DECLINED: u8 = 38;
    pub(crate) const CORRUPT: u8 = 39;
    pub(crate) const NOTIFY: u8 = 40;
    pub(crate) const VOID: u8 = 41;
    pub(crate) const NOTED: u8 = 42;
    pub(crate) const WITHDRAW: u8 = 47;
    pub(crate) const SELECT: u8 = 48;
    pub(crate) const BLOCKS_READY: u8 = 49;
    pub(crate) const HANDOFF_ENDED: u8 = 50;
    pub(crate) const ACK: u8 = 51;
    pub(crate) const VALIDATE: u8 = 52;
    pub(crate) const VALID: u8 = 53;
    pub(crate) const INVALID: u8 = 54;
}

pub(crate) mod control {
    pub(crate) const WATCH: u8 = 1;
    pub(crate) const UNWATCH: u8 = 2;
    pub(crate) const OPENED: u8 = 3;
    pub(crate) const FINISHED: u8 = 4;
    pub(crate) const ENDED: u8 = 5;
    pub(crate) const DESCRIBE: u8 = 6;
    pub(crate) const RELEASE: u8 = 7;
    pub(crate) const RESULT: u8 = 8;
    pub(crate) const REPLY: u8 = 9;
    pub(crate) const SUBSCRIBE: u8 = 10;
    pub(crate) const WATCHED: u8 = 11;
    pub(crate) const PROGRESS: u8 = 12;
    pub(crate) const CHECK: u8 = 13;
}
