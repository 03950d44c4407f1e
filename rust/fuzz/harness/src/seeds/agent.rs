//! Seeds of an agent.

use kvpipe_core::checksum;
use kvpipe_core::handoff::{self, ReadyBlock};
use kvpipe_core::net::codec::Writer;

use super::{NO_CHECKSUMS, REMOTE_READ, SERVER, goodbye};
use crate::agent::{ANOTHER, HANDOFFS, KV};
use crate::script::Script;
use crate::wire::{BLOCK_BYTES, block_ids, head, numbers, ready_blocks, regions, text};

pub(super) fn agent() -> Vec<Vec<u8>> {
    let known = regions(&[(0, KV), (1, ANOTHER)]);
    let met = |flags| Script::new(flags).frame(&known);
    let ids = block_ids(&[0, 2, 4]);
    let blocks = |count: usize| vec![0; count << 10];
    let wanted = |what| head(32, 1).u64(0).u8(what).finish();
    let piece = head(33, 1).u64(0).finish();
    let checksums = numbers(&[checksum::of(&[0; BLOCK_BYTES as usize]); 3]);
    let offer = |number: Option<u64>| {
        let header = head(36, 1).u32(1).u32(0).u8(1);
        match number {
            Some(number) => header.u8(1).u64(number).finish(),
            None => header.u8(0).finish(),
        }
    };
    let offered = |tag: &[u8]| [&ids[..], &ids, &Writer::default().bytes(tag).finish()].concat();
    let of_handoff = |kind, index: usize| Writer::new(kind).raw(&HANDOFFS[index]);
    let select = of_handoff(48, 0).u32(0).u32(0).u32(5).finish();
    let announced = of_handoff(49, 1).u32(0).finish();
    let ready = ready_blocks(&[0, 1].map(|region| ready_block(region, 0)));
    let reason = text("ended");
    let noted = head(42, 1).u64(1).finish();
    let released = Writer::new(2).u32(0).finish();
    let reading = |flags| met(flags).user(0, 3).user(0, 64 + 3);
    let writing = |flags| met(flags).user(1, 3).user(1, 64 + 3);
    let loading = |flags| met(flags).user(5, 8 + 1).message(&announced, &ready);
    vec![
        goodbye(reading(REMOTE_READ | NO_CHECKSUMS)),
        goodbye(
            reading(REMOTE_READ)
                .message(&head(43, 1).u64(0).finish(), &checksums)
                .message(&head(43, 2).u64(0).finish(), &checksums),
        ),
        goodbye(reading(0).sealed(&piece, &blocks(3))),
        goodbye(reading(0).message(&head(35, 1).finish(), &reason)),
        goodbye(
            met(0)
                .message(&wanted(0), &ids)
                .message(&head(34, 1).u64(64).finish(), &[]),
        ),
        goodbye(met(0).message(&wanted(1), &ids)),
        goodbye(met(REMOTE_READ).message(&wanted(2), &ids)),
        goodbye(writing(REMOTE_READ).message(&head(37, 1).finish(), &[])),
        goodbye(writing(0).message(&head(39, 1).finish(), &reason)),
        goodbye(writing(REMOTE_READ | SERVER).message(&head(38, 1).finish(), &reason)),
        goodbye(
            met(REMOTE_READ)
                .message(&offer(Some(0)), &offered(b"tag"))
                .message(&head(43, 1).u64(0).finish(), &checksums)
                .user(3, 0),
        ),
        goodbye(
            met(0)
                .message(&offer(None), &offered(b""))
                .sealed(&piece, &blocks(3)),
        ),
        goodbye(
            met(0)
                .message(&head(40, 0).finish(), b"tag")
                .user(3, 0)
                .user(2, 3)
                .message(&noted, &[]),
        ),
        goodbye(met(0).message(&head(41, 0).finish(), &[])),
        goodbye(
            met(REMOTE_READ)
                .user(6, 5)
                .message(&select, &[])
                .message(&of_handoff(51, 0).finish(), &[]),
        ),
        goodbye(met(REMOTE_READ).message(&select, &[]).user(6, 5).user(7, 0)),
        goodbye(loading(REMOTE_READ | SERVER)),
        goodbye(loading(SERVER).sealed(&piece, &blocks(1))),
        goodbye(
            met(REMOTE_READ)
                .user(5, 1)
                .message(&of_handoff(50, 1).finish(), &reason)
                .user(8, 0)
                .user(9, 0),
        ),
        goodbye(met(REMOTE_READ).user(0, 3).user(4, 0).frame(&released)),
        goodbye(met(REMOTE_READ).frame(&regions(&[(1, ANOTHER)]))),
    ]
}

pub(super) fn ready_block(region: u16, position: u32) -> ReadyBlock {
    let zeros = [0; BLOCK_BYTES as usize];
    ReadyBlock {
        region,
        position,
        block_id: 3,
        checksum: handoff::checksum(&HANDOFFS[1], 0, region, position, &zeros),
    }
}
