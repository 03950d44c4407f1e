//! Blocks that the active process reads from the passive one, by one get each.

use std::time::Instant;

use crate::Result;
use crate::request::{Case, Request, Role, pattern};
use crate::worker::BareWorker;

/// Blocks are small: enough reads that UCX is never idle.
const BLOCKS_IN_FLIGHT: usize = 64;

/// Answers one request.
pub(crate) fn answer(worker: &mut BareWorker, request: &Request) -> Result<String> {
    if request.verb == "meet" {
        return worker.connect(request);
    }
    let (case, kind) = (Case::of(request)?, request.text("kind")?);
    if kind != "blocks" {
        return Err(format!("kind={kind}: expected blocks").into());
    }
    let is_destination = worker.role == Role::Active;
    match request.verb.as_str() {
        "run" if is_destination => read_blocks(worker, &case),
        "clear" if is_destination => Ok(clear(worker)),
        "verify" if is_destination => verify(worker, &case),
        "run" | "clear" | "verify" => Ok("ok".to_owned()),
        verb => Err(format!("{verb:?}: expected meet, clear, run or verify").into()),
    }
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
    Ok(format!("ok seconds={}", started.elapsed().as_secs_f64()))
}

fn clear(worker: &BareWorker) -> String {
    let buffer = worker.region.buffer();
    buffer.write(0, &vec![0; buffer.len()]);
    "ok".to_owned()
}

/// Compares everything that should have arrived with the source's bytes.
fn verify(worker: &BareWorker, case: &Case) -> Result<String> {
    let buffer = worker.region.buffer();
    let expected = pattern(buffer.len());
    let local = case.transfers(buffer.len(), 1).into_iter().flatten();
    let mut pairs = local.zip(case.transfers(buffer.len(), 2).into_iter().flatten());
    let is_equal = |(to, from): (usize, usize)| {
        let arrived = buffer.bytes(to, case.bytes);
        arrived.is_some_and(|arrived| arrived == expected[from..from + case.bytes])
    };
    if pairs.all(is_equal) {
        return Ok("ok".to_owned());
    }
    let bytes = case.bytes;
    Err(format!("blocks of {bytes} bytes did not arrive as they were sent").into())
}
