//! Blocks over one TCP connection with `sendmsg` and `readv`, and nothing else: what streams of kvpipe are compared with.
//! `sealed=yes` seals records of 1 MiB with AES-128-GCM, by one copy on each side.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Instant;

use kvpipe_ucx::Buffer;
use kvpipe_ucx::socket::{self, Range};
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use rustix::net::sockopt;

use crate::Result;
use crate::request::{Case, Request, Role, pattern};

const RECORD: usize = 1 << 20;
const TAG: usize = 16;

pub(crate) struct SocketPeer {
    role: Role,
    region: Buffer,
    listener: TcpListener,
    stream: Option<TcpStream>,
    key: Option<LessSafeKey>,
    num_records: u64,
}

impl SocketPeer {
    pub(crate) fn new(role: Role, request: &Request) -> Result<Self> {
        let key = UnboundKey::new(&AES_128_GCM, &[7; 16]).map_err(|_| "a key")?;
        Ok(Self {
            role,
            region: Buffer::from_vec(pattern(request.number("total")?)),
            listener: TcpListener::bind("127.0.0.1:0")?,
            stream: None,
            key: request.is("sealed", "yes").then(|| LessSafeKey::new(key)),
            num_records: 0,
        })
    }

    pub(crate) fn hello(&self) -> Result<String> {
        Ok(format!("hello port={}", self.listener.local_addr()?.port()))
    }

    pub(crate) fn answer(&mut self, request: &Request) -> Result<String> {
        if request.verb == "meet" {
            let stream = match self.role {
                Role::Active => TcpStream::connect(("127.0.0.1", request.number("port")? as u16))?,
                _ => self.listener.accept()?.0,
            };
            stream.set_nodelay(true)?;
            // As kvpipe does on one host: the system's default may be one that paces.
            sockopt::set_tcp_congestion(&stream, "reno")?;
            self.stream = Some(stream);
            return Ok("ok transport=tcp".to_owned());
        }
        let case = Case::of(request)?;
        let is_destination = self.role == Role::Active;
        match request.verb.as_str() {
            "run" if is_destination => self.receive(&case),
            "run" => self.send(&case),
            "clear" if is_destination => {
                self.region.write(0, &vec![0; self.region.len()]);
                Ok("ok".to_owned())
            }
            "verify" if is_destination => self.verify(&case),
            _ => Ok("ok".to_owned()),
        }
    }

    fn ranges(&self, case: &Case, seed: u64) -> Vec<Vec<Range>> {
        let transfers = case.transfers(self.region.len(), seed).into_iter();
        let ranges = |offsets: Vec<usize>| offsets.into_iter().map(|at| (at, case.bytes)).collect();
        transfers.map(ranges).collect()
    }

    fn nonce(&mut self) -> Nonce {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.num_records.to_be_bytes());
        self.num_records += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    fn send(&mut self, case: &Case) -> Result<String> {
        let mut stream = self.stream.take().ok_or("run before meet")?;
        let mut scratch = Vec::with_capacity(RECORD + TAG);
        for ranges in self.ranges(case, 2) {
            stream.read_exact(&mut [0])?;
            for record in records(&ranges) {
                if self.key.is_none() {
                    each(record, |rest| {
                        socket::send(stream.as_fd(), &[], (&self.region, rest), &[])
                    })?;
                    continue;
                }
                scratch.clear();
                for &(offset, len) in record {
                    let bytes = self.region.bytes(offset, len).ok_or("a block")?;
                    bytes.append_to(&mut scratch);
                }
                let nonce = self.nonce();
                let key = self.key.as_ref().ok_or("a key")?;
                let sealed = key.seal_in_place_append_tag(nonce, Aad::empty(), &mut scratch);
                sealed.map_err(|_| "sealed")?;
                stream.write_all(&scratch)?;
            }
        }
        self.stream = Some(stream);
        Ok("ok".to_owned())
    }

    fn receive(&mut self, case: &Case) -> Result<String> {
        let mut stream = self.stream.take().ok_or("run before meet")?;
        let (all, mut scratch) = (self.ranges(case, 1), vec![0; RECORD + TAG]);
        let started = Instant::now();
        for ranges in all {
            stream.write_all(&[1])?;
            for record in records(&ranges) {
                if self.key.is_none() {
                    each(record, |rest| {
                        let into = Some((&self.region, rest));
                        socket::receive(stream.as_fd(), into, &mut Vec::new(), 0)
                    })?;
                    continue;
                }
                let len: usize = record.iter().map(|range| range.1).sum();
                stream.read_exact(&mut scratch[..len + TAG])?;
                let nonce = self.nonce();
                let key = self.key.as_ref().ok_or("a key")?;
                let opened = key.open_in_place(nonce, Aad::empty(), &mut scratch[..len + TAG]);
                let mut opened = &opened.map_err(|_| "opened")?[..];
                for &(offset, len) in record {
                    let (block, rest) = opened.split_at(len);
                    self.region.write(offset, block);
                    opened = rest;
                }
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        self.stream = Some(stream);
        Ok(format!("ok seconds={seconds}"))
    }

    fn verify(&self, case: &Case) -> Result<String> {
        let original = pattern(self.region.len());
        for (to, from) in self.ranges(case, 1).iter().zip(self.ranges(case, 2)) {
            for (&(to, len), (from, _)) in to.iter().zip(from) {
                let moved = self.region.bytes(to, len).ok_or("a block")?.to_vec();
                if moved != original[from..from + len] {
                    return Err(format!("block at {to} differs").into());
                }
            }
        }
        Ok("ok".to_owned())
    }
}

/// The ranges of each record.
fn records(ranges: &[Range]) -> impl Iterator<Item = &[Range]> {
    let len = ranges.first().map_or(1, |range| range.1);
    ranges.chunks((RECORD / len).clamp(1, socket::RANGES_CAP))
}

/// Moves all of these ranges, by calls that move a part of what they are given.
fn each(ranges: &[Range], mut call: impl FnMut(&[Range]) -> std::io::Result<usize>) -> Result<()> {
    let mut left = ranges.to_vec();
    while !left.is_empty() {
        let mut moved = call(&left)?;
        if moved == 0 {
            return Err("the other side has ended".into());
        }
        let num_whole = left
            .iter()
            .take_while(|range| {
                let is_whole = range.1 <= moved;
                moved -= if is_whole { range.1 } else { 0 };
                is_whole
            })
            .count();
        left.drain(..num_whole);
        if let Some(first) = left.first_mut() {
            *first = (first.0 + moved, first.1 - moved);
        }
    }
    Ok(())
}
