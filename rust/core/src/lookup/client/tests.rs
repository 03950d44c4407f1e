//! A client of several servers when they disagree, and how what it was asked for ends. All reactors run by hand.

use super::super::manual::{ROUNDS, connect, entry, rest, select, serve};
use super::super::{LocalBuffer, LookupQuery, Operation, RemoteBuffer, Selected};
use super::*;
use crate::tensor::Meta;
use crate::work::{Work, work};

/// Bytes of an entry that travels inside its message, and of one that is fetched.
const LENS: [usize; 2] = [100, 1 << 20];
const LINKS: [SessionKey; 2] = [16, 17];

/// Two servers, the first with an entry of so many bytes. The second refuses each select: what it has, nobody would take.
fn servers(num_bytes: usize) -> [LocalBuffer; 2] {
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

/// Runs all reactors until it has come to this.
fn run_until(remote: &RemoteBuffer, servers: &[LocalBuffer], has_come: impl Fn() -> bool) {
    for _ in 0..ROUNDS {
        if has_come() {
            return;
        }
        rest(|| remote.manual_round());
        for server in servers {
            rest(|| server.manual_round());
        }
    }
    panic!("it does not come to that")
}

fn end(
    remote: &RemoteBuffer,
    servers: &[LocalBuffer],
    selected: &Operation<Selected>,
) -> Result<Selected> {
    run_until(remote, servers, || selected.is_completed());
    selected.result().unwrap()
}

/// Entries that can be selected, and those on their way.
fn held(server: &LocalBuffer) -> (Option<usize>, Option<usize>) {
    let info = server.info();
    (info.num_entries, info.num_leased)
}

#[test]
fn an_entry_that_one_server_has_offered_comes_although_another_one_refuses() {
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
fn an_entry_goes_back_that_is_offered_when_another_server_has_refused() {
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

fn client() -> (LookupClient, Arc<CommandQueue>) {
    let command_queue = Arc::new(CommandQueue::new());
    (
        LookupClient::new(Arc::clone(&command_queue), true),
        command_queue,
    )
}

/// Has it wait until it can be sent.
fn insert(client: &mut LookupClient) -> Work<()> {
    let (inserted, completer) = work();
    client.inserts.add(QueuedInsert {
        operation: 0,
        tokens: vec![1],
        items: entry(Meta::default(), 1),
        deadline: None,
        completer,
    });
    inserted
}

#[test]
fn an_insert_ends_with_the_first_lost_server_when_no_other_can_read_it_any_more() {
    let (mut cx, (mut client, _desk)) = (ReactorContext::manual(None), client());
    for session in LINKS {
        cx.add_manual(session, [0; 16], None);
        let is_up = true;
        client.sessions.push(session);
        client.servers.insert(session, ServerSession { is_up });
    }
    let inserted = insert(&mut client);
    let lost = Error::lost("second", "gone");
    client.session_down(&mut cx, LINKS[1], lost.clone());
    assert!(cx.has_failed(LINKS[0]));
    assert_eq!(inserted.result(), None, "the first one may be reading it");
    client.session_down(&mut cx, LINKS[0], Error::Closed("told to".to_owned()));
    assert_eq!(inserted.result(), Some(Err(lost)));
}

#[test]
fn a_client_whose_node_panics_ends_what_was_handed_in_and_refuses_what_follows() {
    let (client, command_queue) = client();
    let select = || {
        let (selected, completer) = work();
        let command = LookupCommand::Select {
            operation: command_queue.operation(),
            query: LookupQuery::Any,
            timeout: None,
            completer,
        };
        (command_queue.send(command), selected)
    };
    let (handed, selected) = select();
    assert_eq!(handed, Ok(()));
    drop(client); // as the driver does then
    assert!(matches!(selected.result(), Some(Err(Error::Closed(_)))));
    assert!(matches!(select().0, Err(Error::Closed(_))));
    assert_eq!(command_queue.info().state, "closed");
}
