//! The in-memory twin follows UCX's rules.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::*;
use crate::work::timespec;

fn worker() -> MemoryWorker {
    MemoryWorker::new(MemoryPath::RemoteRead).unwrap()
}

fn pair() -> (MemoryWorker, MemoryWorker, EndpointId) {
    let (one, other) = (worker(), worker());
    let endpoint = one.connect(&other.address()).unwrap();
    (one, other, endpoint)
}

fn registered(bytes: Vec<u8>) -> Memory {
    Memory::Twin(TwinMemory::new(Buffer::from_vec(bytes)).unwrap())
}

fn key_of(memory: &Memory) -> RemoteKey {
    RemoteKey::Twin(MemoryKey::unpack(&memory.pack_rkey().unwrap()).unwrap())
}

/// Reads the first `len` bytes of `remote` to the start of `local`.
fn read<'a>(
    local: &'a Memory,
    remote: &Memory,
    key: &'a RemoteKey,
    len: usize,
) -> super::super::Get<'a> {
    let remote = remote.buffer().address() as u64;
    super::super::Get {
        local,
        offset: 0,
        len,
        remote,
        key,
        token: 7,
    }
}

/// Progresses until there is nothing to do.
fn events(worker: &MemoryWorker) -> Vec<String> {
    while worker.progress() > 0 {}
    let events = std::iter::from_fn(|| worker.next_event()).map(|event| match event {
        Event::Done { token, result } => {
            format!("{token} {:?}", result.map_err(|status| status.code))
        }
        Event::EndpointFailed { status, .. } => format!("failed {}", status.code),
        Event::Closed { .. } => "closed".to_owned(),
    });
    events.collect()
}

fn is_readable(worker: &MemoryWorker) -> bool {
    let fd = worker.event_fd();
    let mut polled = [PollFd::new(&fd, PollFlags::IN)];
    rustix::event::poll(&mut polled, Some(&timespec(Duration::ZERO))) == Ok(1)
}

#[test]
fn an_endpoint_connects_while_its_other_side_has_not_ended() {
    let (one, _other, endpoint) = pair();
    one.flush(endpoint, 3).unwrap();
    assert_eq!(events(&one), ["3 Ok(())"]);
}

#[test]
fn a_read_copies_registered_memory_and_ends_once() {
    let (one, _other, endpoint) = pair();
    let (source, target) = (registered(vec![1, 2, 3]), registered(vec![0; 3]));
    let key = key_of(&source);
    one.get(endpoint, read(&target, &source, &key, 2)).unwrap();
    assert_eq!(one.outstanding(), 1);
    assert_eq!(events(&one), ["7 Ok(())"]);
    assert_eq!(target.buffer().bytes(0, 3).unwrap().to_vec(), [1, 2, 0]);
    assert_eq!(one.outstanding(), 0);
}

#[test]
fn memory_that_is_not_registered_any_more_or_out_of_range_is_not_read() {
    let (one, _other, endpoint) = pair();
    let (source, target) = (registered(vec![1; 8]), registered(vec![0; 64]));
    let key = key_of(&source);
    one.get(endpoint, read(&target, &source, &key, 9)).unwrap();
    assert_eq!(events(&one), ["7 Err(-19)"]);
    one.get(endpoint, read(&target, &source, &key, 8)).unwrap();
    drop(source);
    assert_eq!(events(&one), ["7 Err(-5)"]);
    let beyond = one.get(endpoint, read(&target, &target, &key, 65));
    assert_eq!(beyond, Err(OUT_OF_RANGE));
    assert_eq!(target.buffer().bytes(0, 64).unwrap().to_vec(), [0; 64]);
}

#[test]
fn a_close_by_force_ends_operations_with_errors_and_writes_nothing_afterwards() {
    let (one, other, endpoint) = pair();
    let (source, target) = (registered(vec![1; 8]), registered(vec![0; 8]));
    let key = key_of(&source);
    one.get(endpoint, read(&target, &source, &key, 8)).unwrap();
    one.get(endpoint, read(&target, &source, &key, 8)).unwrap();
    one.close(endpoint);
    assert_eq!(events(&one), ["7 Err(-16)", "7 Err(-16)", "closed"]);
    assert_eq!(target.buffer().bytes(0, 8).unwrap().to_vec(), [0; 8]);
    let after = one.get(endpoint, read(&target, &source, &key, 8));
    assert_eq!(after, Err(NOT_CONNECTED));
    drop(other);
    assert_eq!(events(&one), [""; 0], "not after the close");
}

#[test]
fn the_end_of_the_other_side_is_reported_once_and_ends_reads() {
    let (one, other, endpoint) = pair();
    let (source, target) = (registered(vec![1; 8]), registered(vec![0; 8]));
    let key = key_of(&source);
    one.get(endpoint, read(&target, &source, &key, 8)).unwrap();
    drop(other);
    assert_eq!(events(&one), ["7 Err(-25)", "failed -25"]);
    let after = one.flush(endpoint, 1);
    assert_eq!(after, Err(RESET_BY_PEER));
    one.close(endpoint);
    assert_eq!(events(&one), ["closed"]);
}

#[test]
fn an_address_of_ucx_or_of_another_process_is_refused() {
    let one = worker();
    let elsewhere = [!one.process, one.number].map(u32::to_le_bytes).concat();
    let not_yet = [one.process, u32::MAX].map(u32::to_le_bytes).concat();
    for address in [&elsewhere[..], &not_yet, &[0; 64], &[]] {
        assert_eq!(one.connect(address), Err(UNREACHABLE));
    }
}

#[test]
fn a_worker_that_ended_before_the_connection_is_reported_as_failed_and_not_refused() {
    let one = worker();
    let endpoint = one.connect(&worker().address()).unwrap();
    let flushed = one.flush(endpoint, 1);
    assert_eq!(flushed, Err(RESET_BY_PEER));
    assert_eq!(events(&one), ["failed -25"]);
}

#[test]
fn an_armed_worker_is_woken_and_one_with_work_is_not_armed() {
    let (one, other, endpoint) = pair();
    assert!(other.arm());
    assert!(!is_readable(&other));
    one.flush(endpoint, 0).unwrap();
    assert!(!one.arm(), "the end of the flush waits");
    let there = other.connect(&one.address()).unwrap();
    drop(one);
    assert!(is_readable(&other));
    assert!(!other.arm(), "an end waits");
    assert_eq!(events(&other), ["failed -25"]);
    other.close(there);
    assert_eq!(events(&other), ["closed"]);
    assert!(other.arm());
    assert!(!is_readable(&other));
}

#[test]
fn a_worker_that_ends_leaves_nothing_behind() {
    let (one, other, _) = pair();
    let (number, port) = (one.number, Arc::downgrade(&one.port));
    let memory = registered(vec![0; 8]);
    let RemoteKey::Twin(key) = key_of(&memory) else {
        return;
    };
    drop((one, memory));
    assert!(!lock(&PORTS).contains_key(&number));
    assert!(key.find().is_none());
    assert!(lock(&other.port.inbox).connected.is_empty());
    assert!(port.upgrade().is_none());
}
