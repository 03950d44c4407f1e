//! A destination whose kernel refuses `process_vm_readv`, at once or in the middle of things: everything arrives all the
//! same, as streams, and the log has one line that names the reason and the remedy.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use kvpipe_core::blocks::Options;
use kvpipe_core::entries::lookup::{Items, LookupBuffer, LookupQuery};
use kvpipe_core::pipe::{Deadline, Pipe};
use kvpipe_core::tensor::{Meta, Received};
use kvpipe_core::work::Then;
use kvpipe_ucx::{Buffer, Search};

use crate::agents::{agent, register};
use crate::common::pipes::{content, meta, send};
use crate::common::refusals::{
    become_unprivileged, is_root, logged, note_log, refuse_process_vm_readv,
};
use crate::common::{self, Process, TIMEOUT, TOKEN, bytes, eventually, pattern, say};

const BLOCK: usize = 64 << 10;
const LEN: usize = 64 << 20;
/// Transfers of each test: the second one is under way when a late refusal comes.
const NUM_TRANSFERS: u64 = 3;

/// The process of the destination: its arguments are the refusal and the address of its peer.
#[test]
fn peer_process() {
    let Some((role, argument, mut parent)) = common::role() else {
        return;
    };
    note_log();
    let search = common::ucx().expect("the parent found UCX");
    let (refusal, address) = argument.split_once(' ').expect("two words");
    if refusal != "late" {
        refuse(refusal);
    }
    // Called when the second transfer has begun.
    let middle = |transport: &str| {
        if refusal == "late" {
            assert_eq!(transport, "cma", "the first one was read");
            refuse("EPERM");
        }
    };
    let transport = match role.as_str() {
        "agent" => reads_blocks(&search, address, middle),
        "pipe" => receives_tensors(&search, &mut parent, middle),
        "lookup" => consumes_entries(&search, address, middle),
        other => panic!("unknown role {other}"),
    };
    let lines = logged();
    say(&mut parent, &format!("{transport} {}", lines.len()));
    say(&mut parent, &lines.join(" and "));
    common::wait_for_the_end(parent);
}

fn refuse(refusal: &str) {
    match refusal {
        "EPERM" => refuse_process_vm_readv(libc::EPERM),
        "ENOSYS" => refuse_process_vm_readv(libc::ENOSYS),
        "user" => become_unprivileged(),
        other => panic!("unknown refusal {other}"),
    }
}

fn reads_blocks(search: &Search, address: &str, middle: impl Fn(&str)) -> String {
    let agent = agent(search);
    let to = Buffer::zeroed(LEN);
    let region = register(&agent, "own", &to, BLOCK, BLOCK);
    let connected = agent.connect(address).expect("connect");
    let peer = connected.wait_for(TIMEOUT).expect("connected");
    let ids: Vec<u32> = (0..(LEN / BLOCK) as u32).collect();
    for number in 0..NUM_TRANSFERS {
        assert!(to.write(0, &vec![0; LEN]));
        let remote = ("kv", ids.iter().rev().copied().collect());
        let plan = agent.prepare(&peer, (&region, ids.clone()), remote);
        let read = agent.read(&plan.expect("plan"), Options::default());
        if number == 1 {
            middle(&peer.transport());
        }
        let read = read.expect("read").wait_for(TIMEOUT);
        assert_eq!(read, Ok(LEN as u64));
        let expected = pattern(LEN, 0).rchunks(BLOCK).collect::<Vec<_>>().concat();
        assert!(bytes(&to) == expected, "content of read {number}");
    }
    let reason = peer.transport_reason();
    assert!(reason.contains("process_vm_readv"), "{reason:?}");
    peer.transport()
}

fn receives_tensors(search: &Search, parent: &mut TcpStream, middle: impl Fn(&str)) -> String {
    let transport = search.clone().into();
    let pipe = Pipe::listen(&common::local(), TOKEN, transport, Duration::ZERO).expect("listen");
    say(parent, &pipe.address().expect("address").to_string());
    for number in 0..NUM_TRANSFERS {
        let received = pipe.receive(None, Deadline::default(), Then::GoOn);
        if number == 1 {
            middle(&pipe.info().transport);
        }
        assert!(
            content(&received.expect("receive")) == pattern(LEN, number),
            "content of tensor {number}"
        );
    }
    pipe.info().transport
}

fn consumes_entries(search: &Search, address: &str, middle: impl Fn(&str)) -> String {
    let (transport, servers) = (search.clone().into(), vec![address.to_owned()]);
    let connected = LookupBuffer::connect(servers, TOKEN, transport, true, TIMEOUT);
    let (buffer, connected) = connected.expect("connect");
    connected.wait_for(TIMEOUT).expect("connected");
    for number in 0..NUM_TRANSFERS {
        let query = LookupQuery::Tokens(vec![number.cast_signed()]);
        let selected = buffer.select(query, None, Then::GoOn).expect("select");
        if number == 1 {
            middle(&buffer.info().transport);
        }
        let found = eventually("an entry", || selected.result());
        let found = found.expect("selected").expect("an entry");
        let key = found.items().0[2].buffer.as_ref().expect("a tensor");
        assert!(
            bytes(key) == pattern(LEN, number),
            "content of entry {number}"
        );
        found.consume();
    }
    buffer.info().transport
}

fn blocks(search: &Search, refusal: &str) {
    let source = agent(search);
    register(
        &source,
        "kv",
        &Buffer::from_vec(pattern(LEN, 0)),
        BLOCK,
        BLOCK,
    );
    let address = source.address().expect("address");
    let argument = format!("{refusal} {address}");
    check(&mut Process::start("agent", &argument), refusal);
}

fn tensors(search: &Search, refusal: &str) {
    let mut receiver = Process::start("pipe", &format!("{refusal} -"));
    let (address, transport) = (receiver.line(), search.clone().into());
    let connected = Pipe::connect(
        &address,
        TOKEN,
        transport,
        kvpipe_core::Integrity::Auto,
        Duration::ZERO,
        TIMEOUT,
    );
    let (sender, connected) = connected.expect("connect");
    connected.wait_for(TIMEOUT).expect("connected");
    let sent = [0, 1, 2].map(|number| send(&sender, pattern(LEN, number)));
    check(&mut receiver, refusal);
    for sent in sent {
        assert_eq!(sent.wait_for(TIMEOUT), Ok(()));
    }
    let transport = || (sender.info().transport == "tcp").then_some(());
    eventually("the sender knows how its tensors travel", transport);
}

fn entries(search: &Search, refusal: &str) {
    let local = LookupBuffer::new(1 << 30);
    let transport = search.clone().into();
    local
        .serve("127.0.0.1:0", TOKEN, transport, true)
        .expect("serve");
    for number in 0..NUM_TRANSFERS {
        let (meta, key) = (meta(LEN), Buffer::from_vec(pattern(LEN, number)));
        let nothing = || Received {
            meta: Meta::default(),
            buffer: None,
        };
        let mut items = [(); 5].map(|()| Arc::new(nothing()));
        items[2] = Arc::new(Received {
            meta,
            buffer: Some(key),
        });
        let inserted = local.insert(vec![number.cast_signed()], Items(items), None, Then::GoOn);
        assert!(inserted.expect("insert").is_completed());
    }
    let argument = format!("{refusal} {}", local.address());
    check(&mut Process::start("lookup", &argument), refusal);
}

/// All has arrived, by the path that is reported, and one line of the log says why.
fn check(destination: &mut Process, refusal: &str) {
    assert_eq!(destination.line(), "tcp 1");
    let (line, remedy) = (destination.line(), remedy(refusal));
    for part in [
        "session.stream peer=127.0.0.1:",
        "transport=tcp",
        "process_vm_readv",
        remedy,
    ] {
        assert!(line.contains(part), "{line} lacks {part}");
    }
}

fn remedy(refusal: &str) -> &'static str {
    match refusal {
        "user" => "run both as one user, or give this process CAP_SYS_PTRACE",
        _ => "the seccomp profile of this process does not allow it: allow process_vm_readv",
    }
}

/// Search for a UCX that reads the memory of another process of this host; `None` after printing why not.
#[allow(clippy::print_stderr, reason = "a skipped test says why")]
fn with_cma() -> Option<Search> {
    let search = common::ucx()?;
    if common::is_tcp() || common::is_rdma() {
        eprintln!("skipped: UCX does not use CMA here");
        return None;
    }
    Some(search)
}

#[allow(clippy::print_stderr, reason = "a skipped test says why")]
fn with_another_user() -> Option<Search> {
    if !is_root() {
        eprintln!("skipped: this process cannot become another user");
        return None;
    }
    with_cma()
}

#[test]
fn blocks_arrive_at_a_process_of_another_user_and_the_log_names_the_remedy() {
    let Some(search) = with_another_user() else {
        return;
    };
    blocks(&search, "user");
}

#[test]
fn tensors_arrive_at_a_process_of_another_user_and_the_log_names_the_remedy() {
    let Some(search) = with_another_user() else {
        return;
    };
    tensors(&search, "user");
}

#[test]
fn entries_arrive_at_a_process_of_another_user_and_the_log_names_the_remedy() {
    let Some(search) = with_another_user() else {
        return;
    };
    entries(&search, "user");
}

#[test]
fn blocks_arrive_where_a_seccomp_profile_refuses_reads_and_the_log_names_the_remedy() {
    let Some(search) = with_cma() else { return };
    blocks(&search, "EPERM");
    // UCX takes this errno for a permission, and tries CMA.
    blocks(&search, "ENOSYS");
}

#[test]
fn tensors_arrive_where_a_seccomp_profile_refuses_reads_and_the_log_names_the_remedy() {
    let Some(search) = with_cma() else { return };
    tensors(&search, "EPERM");
    tensors(&search, "ENOSYS");
}

#[test]
fn entries_arrive_where_a_seccomp_profile_refuses_reads_and_the_log_names_the_remedy() {
    let Some(search) = with_cma() else { return };
    entries(&search, "EPERM");
    entries(&search, "ENOSYS");
}

#[test]
fn a_read_of_blocks_that_is_refused_in_the_middle_goes_on_as_a_stream() {
    let Some(search) = with_cma() else { return };
    blocks(&search, "late");
}

#[test]
fn a_tensor_whose_reads_are_refused_in_the_middle_goes_on_as_a_stream() {
    let Some(search) = with_cma() else { return };
    tensors(&search, "late");
}

#[test]
fn an_entry_whose_reads_are_refused_in_the_middle_goes_on_as_a_stream() {
    let Some(search) = with_cma() else { return };
    entries(&search, "late");
}
