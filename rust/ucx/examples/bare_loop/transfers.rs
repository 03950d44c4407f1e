//! The transfers: tensors from active to passive, blocks from passive to active, messages in both
//! directions.

use std::time::Instant;

use kvpipe_ucx::AmData;

use crate::Result;
use crate::request::{Case, Request, Role, half_median_us, pattern};
use crate::worker::BareWorker;

/// As a Pipe: smaller tensors travel inside their message, larger ones are read.
const EAGER_CAP: usize = 32 << 10;
/// As a Pipe: reads in pieces of 4 MiB, 4 in flight; messages in pieces of 120 KiB, 4 MiB ahead.
const GET_PIECE: usize = 4 << 20;
const GETS_IN_FLIGHT: usize = 4;
const PIECE: usize = 120 << 10;
const PIECES_IN_FLIGHT: usize = (4 << 20) / PIECE;
/// Blocks are small: enough reads that UCX is never idle.
const BLOCKS_IN_FLIGHT: usize = 64;

/// Answers one request.
pub(crate) fn answer(worker: &mut BareWorker, request: &Request) -> Result<String> {
    if request.verb == "meet" {
        return worker.connect(request);
    }
    let (case, kind) = (Case::of(request)?, request.text("kind")?);
    let is_destination = match kind {
        "tensors" => worker.role == Role::Passive,
        "blocks" => worker.role == Role::Active,
        _ => false,
    };
    match request.verb.as_str() {
        "run" => run(worker, request, &case, kind),
        "clear" if is_destination => Ok(clear(worker)),
        "verify" if is_destination => verify(worker, &case, kind),
        "clear" | "verify" => Ok("ok".to_owned()),
        verb => Err(format!("{verb:?}: expected meet, clear, run or verify").into()),
    }
}

fn run(worker: &mut BareWorker, request: &Request, case: &Case, kind: &str) -> Result<String> {
    worker.is_polling = request.is("wait", "poll");
    match (kind, worker.role) {
        ("tensors", Role::Active) => source(worker, case),
        ("tensors", _) => destination(worker, case),
        ("blocks", Role::Active) => read_blocks(worker, case),
        ("blocks", _) => Ok("ok".to_owned()),
        ("latency", Role::Active) => ping(worker, case),
        ("latency", _) => pong(worker, case),
        (kind, _) => Err(format!("kind={kind}: expected tensors, blocks or latency").into()),
    }
}

fn seconds_since(started: Instant) -> String {
    format!("ok seconds={}", started.elapsed().as_secs_f64())
}

fn is_read(worker: &BareWorker, case: &Case) -> Result<bool> {
    Ok(worker.peer()?.has_remote_read && case.bytes > EAGER_CAP)
}

/// The sending side: offers everything at once, or streams it.
fn source(worker: &mut BareWorker, case: &Case) -> Result<String> {
    let total = worker.region.buffer().len();
    worker.wait_for(b"ready")?;
    let started = Instant::now();
    if is_read(worker, case)? {
        worker.send_header(b"go")?;
    } else {
        for (start, len) in pieces(case, total, PIECE) {
            worker.wait_below(PIECES_IN_FLIGHT)?;
            worker.send(&(start as u64).to_le_bytes(), start, len)?;
        }
        worker.wait_below(1)?;
    }
    worker.wait_for(b"done")?;
    Ok(seconds_since(started))
}

/// The side that receives, into the same offsets of its own region.
fn destination(worker: &mut BareWorker, case: &Case) -> Result<String> {
    let total = worker.region.buffer().len();
    worker.send_header(b"ready")?;
    if is_read(worker, case)? {
        worker.wait_for(b"go")?;
        for (start, len) in pieces(case, total, GET_PIECE) {
            worker.wait_below(GETS_IN_FLIGHT)?;
            worker.get(start, len, start)?;
        }
        worker.wait_below(1)?;
    } else {
        worker.place_by_offset();
        let mut missing = case.bytes * case.count;
        while missing > 0 {
            match worker.message()? {
                (_, AmData::Placed(len)) => missing = missing.saturating_sub(len),
                (header, _) => return Err(format!("a message {header:?} that does not fit").into()),
            }
        }
    }
    worker.send_header(b"done")?;
    Ok("ok".to_owned())
}

fn pieces(case: &Case, total: usize, piece: usize) -> impl Iterator<Item = (usize, usize)> {
    let bytes = case.bytes;
    case.offsets(total).flat_map(move |at| {
        let starts = (0..bytes).step_by(piece);
        starts.map(move |start| (at + start, piece.min(bytes - start)))
    })
}

/// One read for each block; the other process is passive.
fn read_blocks(worker: &mut BareWorker, case: &Case) -> Result<String> {
    if !worker.peer()?.has_remote_read {
        return Err("no transport that reads remote memory".into());
    }
    let total = worker.region.buffer().len();
    let (local, remote) = (case.transfers(total, 1), case.transfers(total, 2));
    let started = Instant::now();
    for (to, from) in local.iter().zip(&remote) {
        for (to, from) in to.iter().zip(from) {
            worker.wait_below(BLOCKS_IN_FLIGHT)?;
            worker.get(*to, case.bytes, *from)?;
        }
        worker.wait_below(1)?;
    }
    Ok(seconds_since(started))
}

fn ping(worker: &mut BareWorker, case: &Case) -> Result<String> {
    let mut seconds = Vec::with_capacity(case.count);
    worker.wait_for(b"ready")?;
    for _ in 0..case.count {
        let started = Instant::now();
        worker.send(b"ping", 0, case.bytes)?;
        let (_, data) = worker.message()?;
        seconds.push(started.elapsed().as_secs_f64());
        let reply = worker.region.buffer().bytes(0, case.bytes);
        if reply.is_none_or(|reply| reply != *data) {
            return Err("the reply differs from the message".into());
        }
    }
    worker.wait_below(1)?;
    Ok(format!("ok us={}", half_median_us(seconds)))
}

fn pong(worker: &mut BareWorker, case: &Case) -> Result<String> {
    worker.send_header(b"ready")?;
    for _ in 0..case.count {
        let (_, data) = worker.message()?;
        worker.region.buffer().write(0, &data);
        worker.send(b"pong", 0, data.len())?;
    }
    worker.wait_below(1)?;
    Ok("ok".to_owned())
}

fn clear(worker: &BareWorker) -> String {
    let buffer = worker.region.buffer();
    buffer.write(0, &vec![0; buffer.len()]);
    "ok".to_owned()
}

/// Compares everything that should have arrived with the source's bytes.
fn verify(worker: &BareWorker, case: &Case, kind: &str) -> Result<String> {
    let buffer = worker.region.buffer();
    let expected = pattern(buffer.len());
    let pairs: Vec<(usize, usize)> = if kind == "tensors" {
        case.offsets(buffer.len()).map(|at| (at, at)).collect()
    } else {
        let local = case.transfers(buffer.len(), 1).into_iter().flatten();
        let remote = case.transfers(buffer.len(), 2).into_iter().flatten();
        local.zip(remote).collect()
    };
    let is_equal = |&(to, from): &(usize, usize)| {
        let arrived = buffer.bytes(to, case.bytes);
        arrived.is_some_and(|arrived| arrived == expected[from..from + case.bytes])
    };
    if pairs.iter().all(is_equal) {
        return Ok("ok".to_owned());
    }
    Err(format!(
        "{kind} of {} bytes did not arrive as they were sent",
        case.bytes
    )
    .into())
}
