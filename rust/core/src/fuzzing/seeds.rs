//! Conversations as they should go, written with the product's encoders: what fuzzing starts from. The numbers of kinds
//! are those of docs/reference/wire-format.md.

use super::agent::{ANOTHER, HANDOFFS, THEIRS};
use super::control::{opening, sequence_state};
use super::pipe::meta;
use super::script::{ADDRESS, KEY, Script};
use crate::checksum;
use crate::handoff::{self, ReadyBlock};
use crate::net::codec::Writer;
use crate::net::identity::{Identity, SessionKind};
use crate::transfer::region::{Layout, RemoteRegion};
use crate::{blocks, control};

const GET: u8 = 1;
const SERVER: u8 = 2;
const UNSUMMED: u8 = 16;
const BLOCK: u64 = 1 << 10;

/// Where offered memory is.
const HOST: u8 = 0;

/// Seeds of every target, by its name.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let with_name = |name, scripts: Vec<Vec<u8>>| scripts.into_iter().map(move |it| (name, it));
    [
        with_name("agent", agent()),
        with_name("bootstrap", bootstrap()),
        with_name("control", schedulers()),
        with_name("decoders", decoders()),
        with_name("handshake", handshake()),
        with_name("lookup_client", lookup_client()),
        with_name("lookup_server", lookup_server()),
        with_name("pipe_receiver", pipe_receiver()),
        with_name("pipe_sender", pipe_sender()),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn head(kind: u8, id: u64) -> Writer {
    Writer::new(kind).u64(id)
}

/// An offer of the peer's memory, by a proof of kind `proof`.
fn offer(writer: Writer, len: u64, proof: u8) -> Writer {
    let writer = writer.u64(len).u64(ADDRESS).u8(HOST).u8(proof);
    writer.bytes(&KEY.to_le_bytes())
}

fn goodbye(script: Script) -> Vec<u8> {
    let goodbye = Writer::new(34).str("it is over").finish();
    script.session(&[32]).session(&goodbye).shut().finish()
}

fn pipe_receiver() -> Vec<Vec<u8>> {
    let eager = |id| head(1, id).u8(1).finish();
    let small = meta(3).write(Writer::default()).bytes(b"abc").finish();
    let offered = |proof| offer(meta(40 << 10).write(Writer::default()), 40 << 10, proof);
    let checksum = checksum::of(&vec![0; 40 << 10]);
    let checksums = Writer::default().list(&[checksum], |w, checksum| w.u64(*checksum));
    let announced = |flags, proof| {
        let script = Script::new(flags).user(0, 0).sealed(&eager(0), &small);
        let offer = head(2, 1).u8(1).finish();
        script.user(1, 40).sealed(&offer, &offered(proof).finish())
    };
    let data = head(4, 1).u64(0).finish();
    let ended = |script: Script| script.user(0, 0).frame(b"end").shut().finish();
    vec![
        ended(announced(0, 2).large(&data, (40, 0))),
        ended(announced(GET, 1).message(&head(9, 1).finish(), &checksums.finish())),
        goodbye(announced(GET, 0).message(&head(7, 1).finish(), &[])),
        goodbye(announced(0, 0).user(2, 0).large(&data, (20, 0))),
    ]
}

fn pipe_sender() -> Vec<Vec<u8>> {
    let more = |ids: &[u64]| Writer::default().list(ids, |w, id| w.u64(*id)).finish();
    let taken = |script: Script, id| script.message(&head(6, id).finish(), &more(&[]));
    let say = |script: Script, kind, id| script.message(&head(kind, id).finish(), &[]);
    let sent = |flags| taken(Script::new(flags).user(0, 1).user(0, 80), 0);
    let credit = head(5, 1).u64(40 << 10).finish();
    let accepted = say(sent(0), 3, 1).message(&credit, &[]);
    let both = head(6, 0).finish();
    vec![
        taken(accepted, 1).user(3, 0).shut().finish(),
        taken(sent(GET), 1).user(3, 0).finish(),
        goodbye(say(sent(GET), 8, 1)),
        goodbye(say(sent(0), 10, 1)),
        goodbye(
            Script::new(GET)
                .user(0, 1)
                .user(0, 2)
                .message(&both, &more(&[1])),
        ),
    ]
}

fn region(id: u32, name: &str) -> RemoteRegion {
    RemoteRegion {
        id,
        name: name.to_owned(),
        layout: Layout {
            num_blocks: 16,
            block_bytes: BLOCK,
            stride: BLOCK,
        },
        device: "cpu".to_owned(),
        is_writable: true,
        base: ADDRESS,
        rkey: KEY.to_le_bytes().to_vec(),
    }
}

fn agent() -> Vec<Vec<u8>> {
    let regions = blocks::fuzzing::regions_frame(&[region(0, THEIRS), region(1, ANOTHER)]);
    let met = |flags| Script::new(flags).frame(&regions);
    let ids = blocks::fuzzing::ids_payload(&[0, 2, 4]);
    let blocks = |count: usize| vec![0; count << 10];
    let wanted = |what| head(32, 1).u32(0).u8(what).finish();
    let piece = head(33, 1).u64(0).finish();
    let checksums = blocks::fuzzing::checksums_payload(&[checksum::of(&[0; BLOCK as usize]); 3]);
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
    let is_final = of_handoff(49, 1).u32(0).finish();
    let ready_blocks = [0, 1].map(|region| final_block(region, 0)).to_vec();
    let ready_blocks = blocks::fuzzing::final_payload(&ready_blocks);
    let text = Writer::default().str("ended").finish();
    let noted = head(42, 1).u64(1).finish();
    let released = Writer::new(2).u32(0).finish();
    let reading = |flags| met(flags).user(0, 3).user(0, 64 + 3);
    let writing = |flags| met(flags).user(1, 3).user(1, 64 + 3);
    let loading = |flags| met(flags).user(5, 8 + 1).message(&is_final, &ready_blocks);
    vec![
        goodbye(reading(GET | UNSUMMED)),
        goodbye(
            reading(GET)
                .message(&head(43, 1).u64(0).finish(), &checksums)
                .message(&head(43, 2).u64(0).finish(), &checksums),
        ),
        goodbye(reading(0).sealed(&piece, &blocks(3))),
        goodbye(reading(0).message(&head(35, 1).finish(), &text)),
        goodbye(
            met(0)
                .message(&wanted(0), &ids)
                .message(&head(34, 1).u64(64).finish(), &[]),
        ),
        goodbye(met(0).message(&wanted(1), &ids)),
        goodbye(met(GET).message(&wanted(2), &ids)),
        goodbye(writing(GET).message(&head(37, 1).finish(), &[])),
        goodbye(writing(0).message(&head(39, 1).finish(), &text)),
        goodbye(writing(GET | SERVER).message(&head(38, 1).finish(), &text)),
        goodbye(
            met(GET)
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
            met(GET)
                .user(6, 5)
                .message(&select, &[])
                .message(&of_handoff(51, 0).finish(), &[]),
        ),
        goodbye(met(GET).message(&select, &[]).user(6, 5).user(7, 0)),
        goodbye(loading(GET | SERVER)),
        goodbye(loading(SERVER).sealed(&piece, &blocks(1))),
        goodbye(
            met(GET)
                .user(5, 1)
                .message(&of_handoff(50, 1).finish(), &text)
                .user(8, 0)
                .user(9, 0),
        ),
        goodbye(met(GET).user(0, 3).user(4, 0).frame(&released)),
        goodbye(met(GET).frame(&blocks::fuzzing::regions_frame(&[region(1, ANOTHER)]))),
    ]
}

fn final_block(region: u16, position: u32) -> ReadyBlock {
    let zeros = [0; BLOCK as usize];
    ReadyBlock {
        region,
        position,
        block_id: 3,
        checksum: handoff::checksum(&HANDOFFS[1], 0, region, position, &zeros),
    }
}

fn schedulers() -> Vec<Vec<u8>> {
    let messages =
        control::fuzzing::messages(super::control::HANDOFFS[0], opening(), sequence_state());
    let lent = Script::new(0).user(0, 0).user(1, 0).user(2, 0).user(5, 0);
    let watching = Script::new(SERVER)
        .user(6, 0)
        .user(7, 0)
        .user(10, 9)
        .user(11, 0);
    let one = |message: &Vec<u8>| Script::new(0).user(1, 0).frame(message).user(2, 0);
    let all = |script| {
        messages
            .iter()
            .fold(script, |script: Script, it| script.frame(it))
    };
    let alone = messages.iter().map(|message| one(message).finish());
    let ends = [
        goodbye(all(lent)),
        goodbye(
            all(Script::new(0).user(0, 0).user(1, 0))
                .user(9, 0)
                .user(2, 0),
        ),
        goodbye(all(watching).user(4, 2).user(3, 0)),
    ];
    alone.chain(ends).collect()
}

/// A timeout, tokens, and five tensors, of which one is inside and one offered.
fn entry() -> (Vec<u8>, Vec<u8>) {
    let tokens = Writer::default().u64(u64::MAX);
    let tokens = tokens.list(&[1u64, 2], |w, token| w.u64(*token)).finish();
    let inside = meta(3).write(Writer::new(1)).bytes(b"abc").finish();
    let outside = offer(meta(40 << 10).write(Writer::new(2)), 40 << 10, 0).finish();
    (tokens, [&inside[..], &[0], &outside, &[0, 0]].concat())
}

fn lookup_server() -> Vec<Vec<u8>> {
    let (tokens, tensors) = entry();
    let inserted = [&tokens[..], &tensors].concat();
    let small = [&tokens[..], &[0; 5]].concat();
    let insert = |flags| Script::new(flags).sealed(&head(16, 0).finish(), &inserted);
    let select = [&u64::MAX.to_le_bytes()[..], &[1], &tokens[8..]].concat();
    let any = [&u64::MAX.to_le_bytes()[..], &[0]].concat();
    let asked = |script: Script, query: &[u8]| script.message(&head(19, 1).finish(), query);
    let take = |script: Script| script.message(&head(22, 1).finish(), &[]);
    let settle = |is_taken| head(24, 1).u8(is_taken).finish();
    let data = head(4, 2).u64(0).finish();
    let withdraw = |id| head(25, id).finish();
    vec![
        goodbye(take(asked(insert(GET), &select)).message(&settle(1), &[])),
        goodbye(asked(insert(0).large(&data, (40, 0)), &any).message(&settle(0), &[])),
        goodbye(take(asked(
            Script::new(0).sealed(&head(16, 0).finish(), &small),
            &any,
        ))),
        goodbye(take(asked(Script::new(GET).user(0, 40), &any)).message(&settle(1), &[])),
        goodbye(asked(Script::new(0).user(0, 40), &select).message(&head(3, 5).finish(), &[])),
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

fn lookup_client() -> Vec<Vec<u8>> {
    let (_, tensors) = entry();
    let say = |script: Script, kind, id| script.message(&head(kind, id).finish(), &[]);
    let refused = Writer::new(2).str("no place").finish();
    let inserting = |flags| Script::new(flags).user(0, 40);
    let selecting = |flags| Script::new(flags).user(1, 0);
    let offered = |script: Script| script.sealed(&head(20, 0).finish(), &tensors);
    let data = head(4, 2).u64(0).finish();
    vec![
        goodbye(say(inserting(GET), 17, 0)),
        goodbye(say(say(inserting(0), 3, 0), 17, 0)),
        goodbye(inserting(0).message(&head(18, 0).finish(), &refused)),
        goodbye(say(offered(selecting(GET)), 23, 0).user(4, 0)),
        goodbye(say(offered(selecting(0)).large(&data, (40, 0)), 23, 0).user(3, 0)),
        goodbye(say(selecting(0), 21, 0)),
        goodbye(say(Script::new(0).user(2, 1).user(3, 0), 25, 0)),
    ]
}

fn bootstrap() -> Vec<Vec<u8>> {
    let hello = Writer::new(1).raw(b"KVPP").u16(2).raw(&[7; 32]).finish();
    let challenge = Writer::new(2).u16(2).raw(&[7; 32]).finish();
    let proof = Writer::new(3).raw(&[7; 32]).finish();
    let refusal = Writer::new(7).u8(3).str("not now").finish();
    let differs = Writer::new(7).u8(2).str("a").str("b").str("c").finish();
    let other = Writer::new(1).raw(b"KVPP").u16(9).raw(&[7; 32]).finish();
    vec![
        Script::new(0)
            .session(&hello)
            .session(&proof)
            .shut()
            .finish(),
        Script::new(0).session(&other).message(&[0], &[]).finish(),
        Script::new(SERVER)
            .session(&challenge)
            .session(&proof)
            .finish(),
        Script::new(SERVER).session(&refusal).finish(),
        Script::new(GET).session(&differs).session(&[33]).finish(),
    ]
}

fn handshake() -> Vec<Vec<u8>> {
    // Honest throughout; a byte of the second frame changed; bytes of the script's own in place of it.
    let flags = [0, 1, 2, 3];
    let with = |moves: &'static [u8]| flags.map(|flags| [&[flags], moves].concat());
    [
        with(&[0; 5]),
        with(&[0, 1, 9, 0, 1, 0]),
        with(&[0, 2, 2, 0, 7, 1]),
    ]
    .concat()
}

fn decoders() -> Vec<Vec<u8>> {
    let fields = vec![("dtype".to_owned(), "bfloat16".to_owned())];
    let mut identity = Identity::new(SessionKind::Agent, "engine", fields).expect("identity");
    // Of no life and no machine, so that seeds are always the same.
    (identity.incarnation, identity.host) = ([1; 16], "host".to_owned());
    let (tokens, tensors) = entry();
    let select = [&tokens[..8], &[1], &tokens[8..]].concat();
    let ids = blocks::fuzzing::ids_payload(&[1, 2]);
    let offered =
        Writer::default().bytes(&head(36, 1).u32(1).u32(0).u8(1).u8(1).u64(0).finish()[1..]);
    let offered = offered.raw(&ids).raw(&ids).bytes(b"tag").finish();
    let regions = blocks::fuzzing::regions_frame(&[region(0, THEIRS)]);
    let checksums = Writer::default()
        .list(&[1u64], |w, checksum| w.u64(*checksum))
        .finish();
    let metadata = blocks::Metadata {
        address: "127.0.0.1:4000".to_owned(),
        incarnation: [1; 16],
    };
    let single = [
        identity.write(Writer::default()).finish(),
        meta(3).write(Writer::default()).finish(),
        offer(Writer::default(), 40 << 10, 1).finish(),
        region(0, THEIRS).write(Writer::default()).finish(),
    ];
    let handoff = super::control::HANDOFFS[0];
    let messages = control::fuzzing::messages(handoff, opening(), sequence_state());
    let rest = [
        regions[1..].to_vec(),
        offered,
        ids,
        blocks::fuzzing::final_payload(&[final_block(0, 1)]),
        Writer::default().str("a reason").finish(),
        checksums.clone(),
        metadata.to_bytes(),
        select,
        Writer::new(2).str("no place").finish(),
        tensors,
        offer(Writer::default(), 40 << 10, 1)
            .bytes(&checksums)
            .finish(),
    ];
    let first = single.into_iter().zip(0..).map(|(it, kind)| (kind, it));
    let second = messages.into_iter().map(|it| (4, it));
    let third = rest.into_iter().zip(5..).map(|(it, kind)| (kind, it));
    let all = first.chain(second).chain(third);
    all.map(|(kind, it): (u8, Vec<u8>)| [&[kind], &it[..]].concat())
        .collect()
}
