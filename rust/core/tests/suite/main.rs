//! Behaviour of two or more reactors, over every data path. These are one binary because every test binary sessions the core anew.

#![allow(unreachable_pub, reason = "modules of one binary")]

mod agents;
mod blocks;
mod blocks_close;
mod blocks_notify;
mod blocks_proof;
mod blocks_write;
mod common;
mod control;
mod crowds;
mod engines;
mod frames;
mod handoff;
mod handoff_layers;
mod handoff_regions;
mod handoff_retry;
mod handoff_validate;
mod hostile;
mod lookup;
mod lookup_tokens;
mod peer_loss;
mod pipe;
mod pipe_misuse;
mod pipe_validate;
mod refused_reads;
mod security;
mod sessions;
mod slices;
mod store;
mod subscriptions;
mod workers;
