//! A client whose servers disagree, and how its operations end. All reactors are manual.

mod late_selects;

use std::time::Duration;

use super::super::command_queue::{QueuedInsert, QueuedSelect};
use super::super::{LookupBuffer, LookupQuery, Operation, Selected};
use super::*;
use crate::clock;
use crate::entries::content::write_metas;
use crate::entries::items::key_of;
use crate::entries::lookup::tests::manual::{ROUNDS, connect, entry, rest, select, serve};
use crate::entries::messages::Carried;
use crate::net::codec::Writer;
use crate::session::Service;
use crate::tensor::Meta;
use crate::transfer::exposed::BufferDescription;
use crate::transfer::host::Host;
use crate::work::{Then, Work, work};

/// Bytes of an entry inside its message, and of one that is fetched.
const LENS: [usize; 2] = [100, 1 << 20];
const SESSIONS: [SessionKey; 2] = [16, 17];

/// Two servers. The first has an entry of so many bytes; the second refuses each select, because its entry is malformed.
fn servers(num_bytes: usize) -> [LookupBuffer; 2] {
    let shape = vec![1; 1 << 10];
    let misshapen = Meta {
        shape,
        ..Meta::default()
    };
    [
        serve(vec![entry(Meta::default(), num_bytes)]),
        serve(vec![entry(misshapen, 1)]),
    ]
}

/// Runs all reactors until the condition holds.
fn run_until(remote: &LookupBuffer, servers: &[LookupBuffer], holds: impl Fn() -> bool) {
    for _ in 0..ROUNDS {
        if holds() {
            return;
        }
        rest(|| remote.manual_round());
        for server in servers {
            rest(|| server.manual_round());
        }
    }
    panic!("the condition never holds")
}

fn end(
    remote: &LookupBuffer,
    servers: &[LookupBuffer],
    selected: &Operation<Selected>,
) -> Result<Selected> {
    run_until(remote, servers, || selected.is_completed());
    selected.result().unwrap()
}

/// Visible and leased entries.
fn held(server: &LookupBuffer) -> (Option<usize>, Option<usize>) {
    let info = server.info();
    (info.num_entries, info.num_leased)
}

#[test]
fn an_offered_entry_is_delivered_although_another_server_refuses() {
    for num_bytes in LENS {
        let servers = servers(num_bytes);
        let [first, second] = &servers;
        let remote = connect(&[first, second]);
        let selected = select(&remote);
        rest(|| first.manual_round());
        assert_eq!(held(first), (Some(0), Some(1)));
        rest(|| second.manual_round());
        let delivery = end(&remote, &servers, &selected);
        delivery.unwrap().expect("an entry").consume();
        run_until(&remote, &servers, || held(first) == (Some(0), Some(0)));
        assert_eq!(first.info().num_consumed, 1);
        assert_eq!(remote.info().state, "open");
    }
}

#[test]
fn an_entry_that_is_offered_after_another_server_refused_goes_back() {
    for num_bytes in LENS {
        let servers = servers(num_bytes);
        let [first, second] = &servers;
        let remote = connect(&[first, second]);
        let selected = select(&remote);
        rest(|| second.manual_round());
        rest(|| first.manual_round());
        assert_eq!(held(first), (Some(0), Some(1)));
        let refused = end(&remote, &servers, &selected);
        assert!(matches!(refused, Err(Error::Config(_))), "{refused:?}");
        run_until(&remote, &servers, || held(first) == (Some(1), Some(0)));
        assert_eq!(remote.info().state, "open");
    }
}

/// An insert whose tensors the server reads for longer than the grace period, with PINGs answered meanwhile. Its caller
/// knows that it is late.
fn unsettled_insert(remote: &LookupBuffer, server: &LookupBuffer) -> Operation<()> {
    const LONG: usize = 16 << 20;
    let (timeout, read_time) = (Duration::from_millis(100), Duration::from_millis(200));
    let entry = entry(Meta::default(), LONG);
    let inserted = remote.insert(vec![1], entry, Some(timeout), Then::GoOn);
    let inserted = inserted.unwrap();
    rest(|| remote.manual_round());
    while !inserted.is_completed() {
        server.manual_round();
        clock::advance(read_time);
        rest(|| remote.manual_round());
    }
    let Some(Err(Error::Timeout(text))) = inserted.result() else {
        panic!("{:?}", inserted.result())
    };
    for part in ["may still be read until", "the buffer is usable"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!inserted.is_settled(), "reads are under way");
    inserted
}

#[test]
fn an_insert_that_has_its_space_may_be_transferred_longer_than_its_timeout() {
    clock::stop();
    let server = serve(vec![]);
    let remote = connect(&[&server]);
    let entry = entry(Meta::default(), 16 << 20);
    let inserted = remote.insert(vec![1], entry, Some(Duration::ZERO), Then::GoOn);
    let inserted = inserted.unwrap();
    rest(|| remote.manual_round());
    rest(|| server.manual_round());
    clock::advance(Duration::from_millis(400)); // it is cancelled after 450
    let servers = [server];
    run_until(&remote, &servers, || inserted.is_completed());
    assert_eq!(inserted.result(), Some(Ok(())));
    assert_eq!(held(&servers[0]), (Some(1), Some(0)));
}

#[test]
fn an_insert_that_is_read_long_after_its_deadline_fails_alone_and_its_buffer_goes_on() {
    let server = serve(vec![]);
    let remote = connect(&[&server]);
    let late = unsettled_insert(&remote, &server);
    assert_eq!(remote.info().num_waiting, 1);
    let insert = |token, num_bytes| {
        let entry = entry(Meta::default(), num_bytes);
        let inserted = remote.insert(vec![token], entry, None, Then::GoOn);
        inserted.unwrap()
    };
    let later = LENS.map(|len| insert(2, len));
    let servers = [server];
    run_until(&remote, &servers, || {
        late.is_settled() && later.iter().all(Operation::is_completed)
    });
    assert!(matches!(late.result(), Some(Err(Error::Timeout(_)))));
    assert!(later.iter().all(|it| it.result() == Some(Ok(()))));
    assert_eq!(held(&servers[0]), (Some(2), Some(0)));
    let num_bytes = servers[0].info().num_bytes;
    assert!(num_bytes < Some(2 << 20), "{num_bytes:?} are reserved");
    let info = remote.info();
    assert_eq!((info.state, info.num_waiting), ("open", 0));
    assert_eq!(info.num_inserted, 2);
}

#[test]
fn a_server_that_falls_silent_after_a_late_insert_is_lost_which_settles_the_insert() {
    let server = serve(vec![]);
    let remote = connect(&[&server]);
    let late = unsettled_insert(&remote, &server);
    for _ in 0..20 {
        clock::advance(Duration::from_secs(1));
        rest(|| remote.manual_round());
    }
    assert!(late.is_settled());
    assert!(matches!(late.result(), Some(Err(Error::Timeout(_)))));
    assert_eq!(remote.info().state, "closed");
}

fn client() -> (Host<LookupClient>, Arc<CommandQueue>) {
    let command_queue = Arc::new(CommandQueue::new());
    let client = LookupClient::new(Arc::clone(&command_queue), true);
    (Host::new(client), command_queue)
}

/// Adds an insert that waits to be sent.
fn insert(client: &mut LookupClient) -> Work<()> {
    let (inserted, completer) = work();
    client.inserts.queue.push_back(QueuedInsert {
        operation: 0,
        key: key_of(&[1]),
        items: entry(Meta::default(), 1),
        deadline: None,
        completer,
    });
    inserted
}

#[test]
fn an_entry_larger_than_the_machine_is_refused_by_its_size_before_anything_is_allocated() {
    let (mut links, (mut client, _command_queue)) = (Links::manual(None), client());
    let (server, operation) = (SESSIONS[0], 7);
    let _far = links.add_manual(server, None);
    client.service.sessions.push(server);
    client.service.servers.insert(server);
    client.transfers.session_up(server);
    client.service.exposed.session_up(server);
    let (selected, completer) = work();
    let asked = QueuedSelect {
        operation,
        query: LookupQuery::Any,
        timeout: None,
        is_peek: false,
        completer,
    };
    client.call(&mut links, |client, cx| client.select(cx, asked));
    let (num_bytes, address, in_host, on_request, rkey) = (1 << 60, 4096, 0, 0, [1]);
    let key = Writer::default().u64(num_bytes).u64(address).u8(in_host);
    let key = key.u8(on_request).bytes(&rkey).finish();
    let key = BufferDescription::read(&mut Reader::new(&key)).unwrap();
    let record = write_metas(&[Some(Meta::default()), None, None, None, None]).unwrap();
    let offered = client.call(&mut links, |client, cx| {
        let parts = vec![Carried::Offered(key)];
        client.offer(cx, server, operation, Ok((&record, parts)))
    });
    assert_eq!(offered, Ok(()));
    let Some(Err(Error::Exhausted(text))) = selected.result() else {
        panic!("{:?}", selected.result().map(Result::err))
    };
    let size = "a tensor of 1152921504606846976 bytes is larger than the memory of the machine";
    assert!(text.contains(size), "{text}");
    assert!(!links.has_failed(server), "the buffer is usable");
}

#[test]
fn an_answer_to_an_operation_that_waits_for_none_is_an_error() {
    let (mut links, (mut client, _command_queue)) = (Links::manual(None), client());
    let answered = client.call(&mut links, |client, cx| {
        client.receive(cx, SESSIONS[0], 7, EntryMessage::Done)
    });
    assert!(matches!(answered, Err(Error::Protocol(_))), "{answered:?}");
}

#[test]
fn an_insert_ends_with_the_first_lost_server_once_no_server_can_read_it() {
    let (mut links, (mut client, _command_queue)) = (Links::manual(None), client());
    let mut far = Vec::new();
    for session in SESSIONS {
        far.push(links.add_manual(session, None));
        client.service.sessions.push(session);
        client.service.servers.insert(session);
    }
    let inserted = insert(&mut client.service);
    let lost = Error::lost("second", "gone");
    client.session_down(&mut links, SESSIONS[1], lost.clone());
    assert!(links.has_failed(SESSIONS[0]));
    assert_eq!(inserted.result(), None, "the first one may be reading it");
    client.session_down(
        &mut links,
        SESSIONS[0],
        Error::Closed("on purpose".to_owned()),
    );
    assert_eq!(inserted.result(), Some(Err(lost)));
}

#[test]
fn a_client_whose_reactor_panics_ends_queued_commands_and_refuses_later_ones() {
    let (client, command_queue) = client();
    let select = || {
        let (selected, completer) = work();
        let command = LookupCommand::Select(QueuedSelect {
            operation: command_queue.next_operation(),
            query: LookupQuery::Any,
            timeout: None,
            is_peek: false,
            completer,
        });
        (command_queue.send(command, Then::GoOn), selected)
    };
    let (sent, selected) = select();
    assert_eq!(sent, Ok(()));
    drop(client); // as the driver does then
    assert!(matches!(selected.result(), Some(Err(Error::Closed(_)))));
    assert!(matches!(select().0, Err(Error::Closed(_))));
    assert_eq!(command_queue.info().state, "closed");
}
