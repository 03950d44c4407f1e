//! The least that UCX needs to move tensors and blocks: what `kvpipe bench` holds a Pipe and an
//! Agent against. Same library, settings, error mode and window, cold buffers; no sessions, no
//! queue, no threads, no Python.
//!
//! `bare_loop ROLE total=BYTES` takes one request a line on stdin and answers each with a line
//! (`python/kvpipe/bench/programs` speaks the same). `active` and `passive` are the two processes
//! of a transfer, `copy` is one process that copies blocks within its memory.

mod copy;
mod node;
mod request;
mod transfers;

use std::error::Error;
use std::io::{BufRead, Write};

use node::Node;
use request::{Request, Role};

/// Whatever stops the program; it is answered, then the program goes on with the next request.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let request = Request::parse(&words.join(" "))?;
    let total = request.number("total")?;
    match Role::parse(&request.verb)? {
        Role::Copy => {
            let room = copy::Room::new(total);
            answer("ok", |request| room.answer(request))
        }
        role => {
            let mut node = Node::new(role, total)?;
            let hello = node.hello()?;
            answer(&hello, |request| transfers::answer(&mut node, request))
        }
    }
}

/// Says `hello`, then answers requests until stdin ends.
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
