//! UCX between threads and between processes. These are one binary because every test binary sessions anew.

#![allow(unreachable_pub, reason = "modules of one binary")]

mod common;
mod hostile;
mod loopback;
mod misuse;
mod peer_loss;
mod reaper;
