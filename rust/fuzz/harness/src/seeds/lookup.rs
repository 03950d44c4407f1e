//! Seeds of both sides of a lookup buffer.

use kvpipe_core::net::codec::Writer;

use super::{aborted_stream, goodbye, in_pieces, read, send, stream};
use crate::kinds::entries;
use crate::lookup::user;
use crate::script::{REMOTE_READ, Script};
use crate::wire::{head, meta, offer};

const NO_TIMEOUT: u64 = u64::MAX;
/// Of the offered tensor.
const KIB: u8 = 40;
/// Operations that acknowledge or release that of a select.
const SETTLING: u64 = 9;

fn tokens() -> Vec<u8> {
    [1u64, 2]
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect()
}

/// The record of five tensors: one inside the message, one offered, three absent.
fn record() -> Vec<u8> {
    let inside = meta(Writer::new(1), 3).finish();
    let outside = meta(Writer::new(1), u64::from(KIB) << 10).finish();
    [&inside[..], &[0], &outside, &[0, 0]].concat()
}

/// Record and parts of that entry.
fn parts(writer: Writer) -> Writer {
    let writer = writer.bytes(&record()).u32(2);
    let writer = writer.u8(0).bytes(b"abc");
    offer(writer.u8(1), u64::from(KIB) << 10, 0)
}

/// Record and parts of an entry without tensors.
fn no_parts(writer: Writer) -> Writer {
    writer.bytes(&[0; 5]).u32(0)
}

/// A query by tokens.
fn by_tokens() -> Vec<u8> {
    let query = Writer::new(2).bytes(&tokens());
    query.u8(1).u64(NO_TIMEOUT).u64(NO_TIMEOUT).finish()
}

/// A query for the oldest entry.
fn oldest() -> Vec<u8> {
    let query = Writer::new(1);
    query.u8(1).u64(NO_TIMEOUT).u64(NO_TIMEOUT).finish()
}

fn insert(flags: u8, parts: fn(Writer) -> Writer) -> Script {
    let put = Writer::default().bytes(&tokens());
    let put = parts(put.u64(NO_TIMEOUT).u64(NO_TIMEOUT).u8(0));
    let header = head(entries::PUT, 0).finish();
    Script::new(flags).sealed(&header, &put.finish())
}

fn select(script: Script, query: &[u8]) -> Script {
    script.message(&head(entries::SELECT, 1).finish(), query)
}

fn settle(script: Script, kind: u8) -> Script {
    let header = head(kind, SETTLING).u64(1);
    script.message(&header.finish(), &[])
}

fn cancel(script: Script, is_withdrawn: u8) -> Script {
    let header = head(entries::CANCEL, 0).u8(is_withdrawn);
    script.message(&header.finish(), &[])
}

pub(super) fn server() -> Vec<Vec<u8>> {
    let (by_tokens, any) = (by_tokens(), oldest());
    let consume = |script| send(script, entries::CONSUME, 1);
    let acknowledged = |script| settle(script, entries::ACKNOWLEDGE);
    let released = |script| settle(script, entries::RELEASE);
    let inserted_here = |flags| Script::new(flags).user(user::INSERT, KIB);
    let withdrawn = released(select(Script::new(0), &any));
    let selected_here = withdrawn.user(user::INSERT, 1).user(user::SELECT, 0);
    vec![
        goodbye(acknowledged(consume(select(
            insert(REMOTE_READ, parts),
            &by_tokens,
        )))),
        goodbye(released(select(stream(insert(0, parts), 1, KIB), &any))),
        goodbye(select(aborted_stream(insert(0, parts), 1, KIB), &any)),
        goodbye(in_pieces(insert(0, parts), 1000, |it| stream(it, 1, KIB))),
        goodbye(consume(select(insert(0, no_parts), &any))),
        goodbye(acknowledged(consume(select(
            inserted_here(REMOTE_READ),
            &any,
        )))),
        goodbye(read(select(inserted_here(0), &by_tokens), 5)),
        goodbye(selected_here.user(user::CONSUME, 0)),
        goodbye(cancel(insert(0, parts), 1)),
        goodbye(cancel(insert(0, parts), 0)),
    ]
}

pub(super) fn client() -> Vec<Vec<u8>> {
    let inserting = |flags| Script::new(flags).user(user::INSERT, KIB);
    let offered = |flags| {
        let script = Script::new(flags).user(user::SELECT, 0);
        let offer = parts(Writer::default().u8(0).u64(0));
        script.sealed(&head(entries::OFFER, 0).finish(), &offer.finish())
    };
    let accepted = read(inserting(0), 0);
    let refusal = Writer::new(2).str("no place").finish();
    let refused = inserting(0).message(&head(entries::REFUSED, 0).finish(), &refusal);
    let consumed = |script| send(script, entries::DONE, 0);
    let nothing = send(Script::new(0).user(user::SELECT, 0), entries::NOTHING, 0);
    let dropped = Script::new(0).user(user::SELECT_TOKENS, 1);
    let dropped = dropped.user(user::DROP_SELECT, 0);
    vec![
        goodbye(send(inserting(REMOTE_READ), entries::DONE, 0)),
        goodbye(send(accepted, entries::DONE, 0)),
        goodbye(refused),
        goodbye(consumed(offered(REMOTE_READ)).user(user::CONSUME, 0)),
        goodbye(consumed(stream(offered(0), 1, KIB)).user(user::DROP_SELECT, 0)),
        goodbye(aborted_stream(offered(0), 1, KIB)),
        goodbye(in_pieces(offered(0), 31, |it| stream(it, 1, KIB))),
        goodbye(nothing),
        goodbye(send(dropped, entries::NOTHING, 0)),
    ]
}
