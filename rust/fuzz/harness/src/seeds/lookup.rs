//! Seeds of both sides of a lookup buffer.

use kvpipe_core::net::codec::Writer;

use super::{REMOTE_READ, goodbye};
use crate::script::Script;
use crate::wire::{block_ids, head, meta, offer};

/// A timeout with tokens, and the five tensors of an entry: one inside the message, one offered, three absent.
pub(super) fn entry() -> (Vec<u8>, Vec<u8>) {
    let tokens = Writer::default().u64(u64::MAX);
    let tokens = tokens.list(&[1u64, 2], |w, token| w.u64(*token)).finish();
    let inside = meta(Writer::new(1), 3).bytes(b"abc").finish();
    let outside = offer(meta(Writer::new(2), 40 << 10), 40 << 10, 0).finish();
    (tokens, [&inside[..], &[0], &outside, &[0, 0]].concat())
}

pub(super) fn server() -> Vec<Vec<u8>> {
    let (tokens, tensors) = entry();
    let inserted = [&tokens[..], &tensors].concat();
    let small = [&tokens[..], &[0; 5]].concat();
    let insert = |flags| Script::new(flags).sealed(&head(16, 0).finish(), &inserted);
    let select = [&u64::MAX.to_le_bytes()[..], &[1], &tokens[8..]].concat();
    let any = [&u64::MAX.to_le_bytes()[..], &[0]].concat();
    let asked = |script: Script, query: &[u8]| script.message(&head(19, 1).finish(), query);
    let take = |script: Script| script.message(&head(22, 1).finish(), &[]);
    let settle = |is_consumed| head(24, 1).u8(is_consumed).finish();
    let data = head(33, 1).u64(0).finish();
    let read = head(32, 1).u64(5).u8(1).finish();
    let withdraw = |id| head(25, id).finish();
    vec![
        goodbye(take(asked(insert(REMOTE_READ), &select)).message(&settle(1), &[])),
        goodbye(asked(insert(0).large(&data, (40, 0)), &any).message(&settle(0), &[])),
        goodbye(take(asked(
            Script::new(0).sealed(&head(16, 0).finish(), &small),
            &any,
        ))),
        goodbye(take(asked(Script::new(REMOTE_READ).user(0, 40), &any)).message(&settle(1), &[])),
        goodbye(asked(Script::new(0).user(0, 40), &select).message(&read, &block_ids(&[0]))),
        goodbye(
            asked(Script::new(0), &any)
                .message(&withdraw(1), &[])
                .user(0, 1)
                .user(1, 0)
                .user(4, 0),
        ),
        goodbye(insert(0).message(&withdraw(0), &[])),
    ]
}

pub(super) fn client() -> Vec<Vec<u8>> {
    let (_, tensors) = entry();
    let send = |script: Script, kind, id| script.message(&head(kind, id).finish(), &[]);
    let refused = Writer::new(2).str("no place").finish();
    let inserting = |flags| Script::new(flags).user(0, 40);
    let selecting = |flags| Script::new(flags).user(1, 0);
    let read = head(32, 1).u64(0).u8(1).finish();
    let offered = |script: Script| script.sealed(&head(20, 0).finish(), &tensors);
    let data = head(33, 1).u64(0).finish();
    vec![
        goodbye(send(inserting(REMOTE_READ), 17, 0)),
        goodbye(send(inserting(0).message(&read, &block_ids(&[0])), 17, 0)),
        goodbye(inserting(0).message(&head(18, 0).finish(), &refused)),
        goodbye(send(offered(selecting(REMOTE_READ)), 23, 0).user(4, 0)),
        goodbye(send(offered(selecting(0)).large(&data, (40, 0)), 23, 0).user(3, 0)),
        goodbye(send(selecting(0), 21, 0)),
        goodbye(send(Script::new(0).user(2, 1).user(3, 0), 25, 0)),
    ]
}
