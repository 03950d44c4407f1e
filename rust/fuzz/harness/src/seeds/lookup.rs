//! Seeds of both sides of a lookup buffer.

use kvpipe_core::net::codec::Writer;

use super::{aborted_stream, goodbye, in_pieces, read, send, stream};
use crate::kinds::lookup;
use crate::lookup::user;
use crate::script::{REMOTE_READ, Script};
use crate::wire::{head, meta, offer};

const NO_TIMEOUT: u64 = u64::MAX;
/// Of the offered tensor.
const KIB: u8 = 40;

fn tokens(writer: Writer) -> Writer {
    writer.list(&[1u64, 2], |w, token| w.u64(*token))
}

/// The five tensors of an entry: one inside the message, one offered, three absent.
pub(super) fn tensors() -> Vec<u8> {
    let len = u64::from(KIB) << 10;
    let inside = meta(Writer::new(1), 3).bytes(b"abc").finish();
    let outside = offer(meta(Writer::new(2), len), len, 0).finish();
    [&inside[..], &[0], &outside, &[0, 0]].concat()
}

/// A query by tokens.
pub(super) fn by_tokens() -> Vec<u8> {
    tokens(Writer::default().u64(NO_TIMEOUT).u8(1)).finish()
}

fn insert(flags: u8, tensors: &[u8]) -> Script {
    let entry = tokens(Writer::default().u64(NO_TIMEOUT)).raw(tensors);
    let header = head(lookup::INSERT, 0).finish();
    Script::new(flags).sealed(&header, &entry.finish())
}

fn select(script: Script, query: &[u8]) -> Script {
    script.message(&head(lookup::SELECT, 1).finish(), query)
}

fn settle(script: Script, is_consumed: u8) -> Script {
    let header = head(lookup::SETTLE, 1).u8(is_consumed);
    script.message(&header.finish(), &[])
}

pub(super) fn server() -> Vec<Vec<u8>> {
    let (all, by_tokens) = (tensors(), by_tokens());
    let any = Writer::default().u64(NO_TIMEOUT).u8(0).finish();
    let consume = |script| send(script, lookup::CONSUME, 1);
    let inserted_here = |flags| Script::new(flags).user(user::INSERT, KIB);
    let withdrawn = send(select(Script::new(0), &any), lookup::WITHDRAW, 1);
    let selected_here = withdrawn.user(user::INSERT, 1).user(user::SELECT, 0);
    vec![
        goodbye(settle(
            consume(select(insert(REMOTE_READ, &all), &by_tokens)),
            1,
        )),
        goodbye(settle(select(stream(insert(0, &all), 1, KIB), &any), 0)),
        goodbye(select(aborted_stream(insert(0, &all), 1, KIB), &any)),
        goodbye(in_pieces(insert(0, &all), 1000, |it| stream(it, 1, KIB))),
        goodbye(consume(select(insert(0, &[0; 5]), &any))),
        goodbye(settle(consume(select(inserted_here(REMOTE_READ), &any)), 1)),
        goodbye(read(select(inserted_here(0), &by_tokens), 5)),
        goodbye(selected_here.user(user::CONSUME, 0)),
        goodbye(send(insert(0, &all), lookup::WITHDRAW, 0)),
        goodbye(send(insert(0, &all), lookup::CANCEL, 0)),
    ]
}

pub(super) fn client() -> Vec<Vec<u8>> {
    let inserting = |flags| Script::new(flags).user(user::INSERT, KIB);
    let offered = |flags| {
        let script = Script::new(flags).user(user::SELECT, 0);
        script.sealed(&head(lookup::OFFER, 0).finish(), &tensors())
    };
    let accepted = read(inserting(0), 0);
    let refusal = Writer::new(2).str("no place").finish();
    let refused = inserting(0).message(&head(lookup::REFUSED, 0).finish(), &refusal);
    let consumed = |script| send(script, lookup::CONSUMED, 0);
    let nothing = send(Script::new(0).user(user::SELECT, 0), lookup::NOTHING, 0);
    let dropped = Script::new(0).user(user::SELECT_TOKENS, 1);
    let dropped = dropped.user(user::DROP_SELECT, 0);
    vec![
        goodbye(send(inserting(REMOTE_READ), lookup::INSERTED, 0)),
        goodbye(send(accepted, lookup::INSERTED, 0)),
        goodbye(refused),
        goodbye(consumed(offered(REMOTE_READ)).user(user::CONSUME, 0)),
        goodbye(consumed(stream(offered(0), 1, KIB)).user(user::DROP_SELECT, 0)),
        goodbye(aborted_stream(offered(0), 1, KIB)),
        goodbye(in_pieces(offered(0), 31, |it| stream(it, 1, KIB))),
        goodbye(nothing),
        goodbye(send(dropped, lookup::NOTHING, 0)),
    ]
}
