//! The least that UCX, or sockets, need to move blocks: the baseline of `kvpipe bench`. With UCX it has the library, settings
//! and error mode of an Agent, and cold buffers. It has no sessions, queues, threads or Python.
//!
//! `bare_loop ROLE total=BYTES` reads one request a line from stdin and answers each with a line
//! (`bench/programs` is the other side). `active` and `passive` are the two processes
//! of a transfer, `copy` is one process that copies blocks within its memory.

mod copy;
mod request;
mod sockets;
mod transfers;
mod worker;

use std::error::Error;
use std::io::{BufRead, Write};

use request::{Request, Role};
use sockets::SocketPeer;
use worker::BareWorker;

/// An error is the answer to its request; the program goes on with the next one.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let request = Request::parse(&words.join(" "))?;
    let total = request.number("total")?;
    match Role::parse(&request.verb)? {
        Role::Copy => {
            let buffers = copy::CopyBuffers::new(total);
            answer("ok", |request| buffers.answer(request))
        }
        role if request.is("over", "sockets") => {
            let mut peer = SocketPeer::new(role, &request)?;
            let hello = peer.hello()?;
            answer(&hello, |request| peer.answer(request))
        }
        role => {
            let mut worker = BareWorker::new(role, total)?;
            let hello = worker.hello()?;
            answer(&hello, |request| transfers::answer(&mut worker, request))
        }
    }
}

/// Writes `hello`, then answers requests until stdin ends.
fn answer(hello: &str, mut reply: impl FnMut(&Request) -> Result<String>) -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{hello}")?;
    for line in std::io::stdin().lock().lines() {
        let text = Request::parse(&line?)
            .and_then(|request| reply(&request))
            .unwrap_or_else(|error| format!("error {error}"));
        writeln!(out, "{text}")?;
        out.flush()?;
    }
    Ok(())
}
