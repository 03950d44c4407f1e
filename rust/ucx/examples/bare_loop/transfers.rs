//! What is measured: tensors from active to passive, blocks from passive to active, and messages
//! there and back.

use std::time::Instant;

use kvpipe_ucx::AmData;

use crate::Result;
use crate::node::Node;
use crate::request::{Case, Request, Role, half_median_us, pattern};

/// As a Pipe: smaller tensors travel inside their message, larger ones are read.
const EAGER_CAP: usize = 32 << 10;
/// As a Pipe: reads in pieces of 4 MiB, 4 in flight; messages in pieces of 120 KiB, 4 MiB ahead.
const GET_PIECE: usize = 4 << 20;
const GETS_IN_FLIGHT: usize = 4;
const PIECE: usize = 120 << 10;
const PIECES_IN_FLIGHT: usize = (4 << 20) / PIECE;
/// Blocks are small: so many reads at once that UCX is never without one.
const BLOCKS_IN_FLIGHT: usize = 64;

/// Does what one request asks.
pub(crate) fn answer(node: &mut Node, request: &Request) -> Result<String> {
    if request.verb == "meet" {
        return node.meet(request);
    }
    let (case, kind) = (Case::of(request)?, request.text("kind")?);
    let is_destination = match kind {
        "tensors" => node.role == Role::Passive,
        "blocks" => node.role == Role::Active,
        _ => false,
    };
    match request.verb.as_str() {
        "run" => run(node, request, &case, kind),
        "clear" if is_destination => Ok(clear(node)),
        "verify" if is_destination => verify(node, &case, kind),
        "clear" | "verify" => Ok("ok".to_owned()),
        verb => Err(format!("{verb:?}: expected meet, clear, run or verify").into()),
    }
}

fn run(node: &mut Node, request: &Request, case: &Case, kind: &str) -> Result<String> {
    node.is_polling = request.is("wait", "poll");
    match (kind, node.role) {
        ("tensors", Role::Active) => source(node, case),
        ("tensors", _) => destination(node, case),
        ("blocks", Role::Active) => read_blocks(node, case),
        ("blocks", _) => Ok("ok".to_owned()),
        ("latency", Role::Active) => ping(node, case),
        ("latency", _) => pong(node, case),
        (kind, _) => Err(format!("kind={kind}: expected tensors, blocks or latency").into()),
    }
}

fn seconds_since(started: Instant) -> String {
    format!("ok seconds={}", started.elapsed().as_secs_f64())
}

fn is_read(node: &Node, case: &Case) -> Result<bool> {
    Ok(node.peer()?.has_get && case.bytes > EAGER_CAP)
}

/// The side that sends: offers everything at once, or pushes it.
fn source(node: &mut Node, case: &Case) -> Result<String> {
    let total = node.region.buffer().len();
    node.wait_for(b"ready")?;
    let started = Instant::now();
    if is_read(node, case)? {
        node.tell(b"go")?;
    } else {
        for (start, len) in pieces(case, total, PIECE) {
            node.wait_below(PIECES_IN_FLIGHT)?;
            node.send(&(start as u64).to_le_bytes(), start, len)?;
        }
        node.wait_below(1)?;
    }
    node.wait_for(b"done")?;
    Ok(seconds_since(started))
}

/// The side that receives, into the same offsets of its own region.
fn destination(node: &mut Node, case: &Case) -> Result<String> {
    let total = node.region.buffer().len();
    node.tell(b"ready")?;
    if is_read(node, case)? {
        node.wait_for(b"go")?;
        for (start, len) in pieces(case, total, GET_PIECE) {
            node.wait_below(GETS_IN_FLIGHT)?;
            node.get(start, len, start)?;
        }
        node.wait_below(1)?;
    } else {
        node.place_by_offset();
        let mut missing = case.bytes * case.count;
        while missing > 0 {
            match node.message()? {
                (_, AmData::Placed(len)) => missing = missing.saturating_sub(len),
                (header, _) => return Err(format!("a message {header:?} that does not fit").into()),
            }
        }
    }
    node.tell(b"done")?;
    Ok("ok".to_owned())
}

fn pieces(case: &Case, total: usize, piece: usize) -> impl Iterator<Item = (usize, usize)> {
    let bytes = case.bytes;
    case.offsets(total).flat_map(move |at| {
        let starts = (0..bytes).step_by(piece);
        starts.map(move |start| (at + start, piece.min(bytes - start)))
    })
}

/// One read for each block; the other process does nothing.
fn read_blocks(node: &mut Node, case: &Case) -> Result<String> {
    if !node.peer()?.has_get {
        return Err("no transport that reads remote memory".into());
    }
    let total = node.region.buffer().len();
    let (local, remote) = (case.transfers(total, 1), case.transfers(total, 2));
    let started = Instant::now();
    for (to, from) in local.iter().zip(&remote) {
        for (to, from) in to.iter().zip(from) {
            node.wait_below(BLOCKS_IN_FLIGHT)?;
            node.get(*to, case.bytes, *from)?;
        }
        node.wait_below(1)?;
    }
    Ok(seconds_since(started))
}

fn ping(node: &mut Node, case: &Case) -> Result<String> {
    let mut seconds = Vec::with_capacity(case.count);
    node.wait_for(b"ready")?;
    for _ in 0..case.count {
        let started = Instant::now();
        node.send(b"ping", 0, case.bytes)?;
        let (_, data) = node.message()?;
        seconds.push(started.elapsed().as_secs_f64());
        if node.region.buffer().bytes(0, case.bytes) != Some(&data) {
            return Err("what came back is not what was sent".into());
        }
    }
    node.wait_below(1)?;
    Ok(format!("ok us={}", half_median_us(seconds)))
}

fn pong(node: &mut Node, case: &Case) -> Result<String> {
    node.tell(b"ready")?;
    for _ in 0..case.count {
        let (_, data) = node.message()?;
        node.region.buffer().write(0, &data);
        node.send(b"pong", 0, data.len())?;
    }
    node.wait_below(1)?;
    Ok("ok".to_owned())
}

fn clear(node: &Node) -> String {
    let buffer = node.region.buffer();
    buffer.write(0, &vec![0; buffer.len()]);
    "ok".to_owned()
}

/// Whether everything that should have arrived is what the source has there.
fn verify(node: &Node, case: &Case, kind: &str) -> Result<String> {
    let buffer = node.region.buffer();
    let expected = pattern(buffer.len());
    let pairs: Vec<(usize, usize)> = if kind == "tensors" {
        case.offsets(buffer.len()).map(|at| (at, at)).collect()
    } else {
        let local = case.transfers(buffer.len(), 1).into_iter().flatten();
        let remote = case.transfers(buffer.len(), 2).into_iter().flatten();
        local.zip(remote).collect()
    };
    let is_right = |&(to, from): &(usize, usize)| {
        buffer.bytes(to, case.bytes) == expected.get(from..from + case.bytes)
    };
    if pairs.iter().all(is_right) {
        return Ok("ok".to_owned());
    }
    Err(format!(
        "{kind} of {} bytes did not arrive as they were sent",
        case.bytes
    )
    .into())
}
