//! Seeds of both ends of a pipe.

use kvpipe_core::checksum;
use kvpipe_core::net::codec::Writer;

use super::{REMOTE_READ, goodbye};
use crate::script::Script;
use crate::wire::{block_ids, head, meta, numbers, offer};

pub(super) fn receiver() -> Vec<Vec<u8>> {
    let eager = |id| head(1, id).u8(1).finish();
    let small = meta(Writer::default(), 3).bytes(b"abc").finish();
    let offered = |checksum_mode| offer(meta(Writer::default(), 40 << 10), 40 << 10, checksum_mode);
    let checksum = checksum::of(&vec![0; 40 << 10]);
    let checksums = numbers(&[checksum]);
    let announced = |flags, checksum_mode| {
        let script = Script::new(flags).user(0, 0).sealed(&eager(0), &small);
        let offer = head(2, 1).u8(1).finish();
        script
            .user(1, 40)
            .sealed(&offer, &offered(checksum_mode).finish())
    };
    let data = head(33, 1).u64(0).finish();
    let ended = |script: Script| script.user(0, 0).frame(b"end").shut().finish();
    vec![
        ended(announced(0, 2).large(&data, (40, 0))),
        ended(announced(REMOTE_READ, 1).message(&head(44, 1).u64(0).finish(), &checksums)),
        goodbye(announced(REMOTE_READ, 0).message(&head(7, 1).finish(), &[])),
        goodbye(announced(0, 0).user(2, 0).large(&data, (20, 0))),
    ]
}

pub(super) fn sender() -> Vec<Vec<u8>> {
    let acked = |script: Script, id| script.message(&head(6, id).finish(), &numbers(&[]));
    let reply = |script: Script, kind, id| script.message(&head(kind, id).finish(), &[]);
    let posted = |flags| acked(Script::new(flags).user(0, 1).user(0, 80), 0);
    let credit = head(34, 1).u64(40 << 10).finish();
    let read = head(32, 1).u64(1).u8(1).finish();
    let accepted = posted(0)
        .message(&read, &block_ids(&[0]))
        .message(&credit, &[]);
    let both = head(6, 0).finish();
    vec![
        acked(accepted, 1).user(3, 0).shut().finish(),
        acked(posted(REMOTE_READ), 1).user(3, 0).finish(),
        goodbye(reply(posted(REMOTE_READ), 8, 1)),
        goodbye(reply(posted(0), 10, 1)),
        goodbye(
            Script::new(REMOTE_READ)
                .user(0, 1)
                .user(0, 2)
                .message(&both, &numbers(&[1])),
        ),
    ]
}
