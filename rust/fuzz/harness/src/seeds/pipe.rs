//! Seeds of both ends of a pipe.

use kvpipe_core::checksum;
use kvpipe_core::net::codec::Writer;

use super::{aborted_stream, broken, goodbye, in_pieces, read, send, stream};
use crate::kinds::{pipe, transfer};
use crate::pipe::{receiver_user, sender_user};
use crate::script::{REMOTE_READ, Script, VALIDATES};
use crate::wire::{head, meta, numbers, offer};

/// Of the large tensor.
const KIB: u8 = 40;

/// A small tensor, then the offer of a large one, and a receive for each.
fn announced(flags: u8, verification: u8) -> Script {
    let is_checksummed = 1;
    let eager = head(pipe::EAGER, 0).u8(is_checksummed).finish();
    let small = meta(Writer::default(), 3).bytes(b"abc").finish();
    let len = u64::from(KIB) << 10;
    let large = offer(meta(Writer::default(), len), len, verification).finish();
    let header = head(pipe::OFFER, 1).u8(is_checksummed).finish();
    let script = Script::new(flags).user(receiver_user::RECEIVE, 0);
    let script = script.sealed(&eager, &small);
    let script = script.user(receiver_user::RECEIVE_OUT, KIB);
    script.sealed(&header, &large)
}

pub(super) fn receiver() -> Vec<Vec<u8>> {
    let checksum = checksum::of(&vec![0; usize::from(KIB) << 10]);
    let checksums = head(transfer::SOURCE_CHECKSUMS, 1).u64(0).finish();
    let checksummed = announced(REMOTE_READ, 1).message(&checksums, &numbers(&[checksum]));
    let withdrawn = announced(0, 0).user(receiver_user::WITHDRAW, 0);
    let ended = |script: Script| {
        let script = script.user(receiver_user::RECEIVE, 0);
        script.bare(&[pipe::END]).shut().finish()
    };
    vec![
        ended(stream(announced(0, 2), 1, KIB)),
        ended(in_pieces(announced(0, 2), 7, |it| stream(it, 1, KIB))),
        ended(aborted_stream(announced(0, 2), 1, KIB)),
        ended(checksummed),
        goodbye(send(announced(REMOTE_READ, 0), pipe::WITHDRAW, 1)),
        goodbye(stream(withdrawn, 1, KIB / 2)),
        ended(send(announced(REMOTE_READ, 3), pipe::VALID, 1)),
        goodbye(send(announced(REMOTE_READ, 3), pipe::INVALID, 1)),
    ]
}

pub(super) fn broken_off() -> Vec<Vec<u8>> {
    broken(|| announced(0, 2))
}

fn acknowledge(script: Script, first: u64, others: &[u64]) -> Script {
    script.message(&head(pipe::ACK, first).finish(), &numbers(others))
}

pub(super) fn sender() -> Vec<Vec<u8>> {
    // A small tensor, which is acknowledged, and the offer of a large one.
    let offering = |flags| {
        let script = Script::new(flags).user(sender_user::SEND, 1);
        acknowledge(script.user(sender_user::SEND, 80), 0, &[])
    };
    let credit = head(transfer::CREDIT, 1).u64(40 << 10).finish();
    let accepted = read(offering(0), 1).message(&credit, &[]);
    let closing = |script| acknowledge(script, 1, &[]).user(sender_user::CLOSE, 0);
    let two_small = Script::new(REMOTE_READ).user(sender_user::SEND, 1);
    let two_small = two_small.user(sender_user::SEND, 2);
    vec![
        closing(accepted).shut().finish(),
        closing(offering(REMOTE_READ)).finish(),
        goodbye(send(offering(REMOTE_READ), pipe::WITHDRAWN, 1)),
        goodbye(send(offering(0), pipe::CORRUPT, 1)),
        goodbye(acknowledge(two_small, 0, &[1])),
        closing(send(offering(REMOTE_READ | VALIDATES), pipe::VALIDATE, 1)).finish(),
    ]
}
