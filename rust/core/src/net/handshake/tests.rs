use super::frames::{CHALLENGE, PROOF, REFUSED};
use super::*;
use crate::net::identity::SessionKind;
use crate::net::secret::tests::{TOKEN, assert_discloses_nothing};
use proptest::prelude::*;

fn identity(dtype: &str) -> Identity {
    let fields = vec![("dtype".to_owned(), dtype.to_owned())];
    Identity::new(SessionKind::Pipe, "engine", fields).unwrap()
}

/// Runs both sides against each other; what each ends with.
fn converse(
    tokens: [&[u8]; 2],
    ours: [&Identity; 2],
    accept: impl Fn(&Identity) -> std::result::Result<(), String>,
) -> (Result<SessionId>, Result<SessionId>) {
    let (mut client, hello) = Handshake::client(&Secret::new(tokens[0]), "server").unwrap();
    let mut server = Handshake::server(&Secret::new(tokens[1]), "client").unwrap();
    let (mut to_server, mut to_client) = (vec![hello], vec![]);
    let (mut at_client, mut at_server) = (None, None);
    while at_client.is_none() || at_server.is_none() {
        let (side, identity, inbox, outbox, outcome) = if to_server.is_empty() {
            (
                &mut client,
                ours[0],
                &mut to_client,
                &mut to_server,
                &mut at_client,
            )
        } else {
            (
                &mut server,
                ours[1],
                &mut to_server,
                &mut to_client,
                &mut at_server,
            )
        };
        let Some(frame) = inbox.pop() else { break };
        match side.frame(&frame, identity, |peer| accept(peer)) {
            Ok(Step::Continue(frame)) => outbox.push(frame),
            Ok(Step::Admitted {
                frame, session_id, ..
            }) => {
                outbox.push(frame);
                *outcome = Some(Ok(session_id));
            }
            Ok(Step::Ready(_)) => {}
            Ok(Step::Refuse(frame, error)) => {
                outbox.push(frame);
                *outcome = Some(Err(error));
            }
            Err(error) => *outcome = Some(Err(error)),
        }
    }
    let open = || Err(Error::Closed("no outcome".to_owned()));
    (
        at_client.unwrap_or_else(open),
        at_server.unwrap_or_else(open),
    )
}

#[test]
fn both_sides_agree_on_the_session() {
    let who = identity("float32");
    let (client, server) = converse([b"secret", b"secret"], [&who, &who], |_| Ok(()));
    assert_eq!(client.unwrap(), server.unwrap());
}

#[test]
fn a_wrong_token_is_refused_on_both_sides() {
    let who = identity("float32");
    let (client, server) = converse([b"secret", b"other"], [&who, &who], |_| Ok(()));
    assert!(
        matches!(client, Err(Error::Authentication(_))),
        "{client:?}"
    );
    assert!(
        matches!(server, Err(Error::Authentication(_))),
        "{server:?}"
    );
}

#[test]
fn a_different_fingerprint_names_the_field_and_each_sides_values() {
    let (ours, theirs) = (identity("float32"), identity("bfloat16"));
    let (client, server) = converse([b"t", b"t"], [&ours, &theirs], |_| Ok(()));
    let text = client.unwrap_err().to_string();
    assert!(
        text.contains("dtype is \"float32\" here and \"bfloat16\" there"),
        "{text}"
    );
    let text = server.unwrap_err().to_string();
    assert!(
        text.contains("dtype is \"bfloat16\" here and \"float32\" there"),
        "{text}"
    );
}

/// HELLO is type, magic, version, nonce; CHALLENGE is type, version, nonce.
#[test]
fn a_peer_of_another_version_is_refused_with_both_versions_named_on_both_sides() {
    let who = identity("float32");
    let older = PROTOCOL_VERSION - 1;
    let versions = |side: u16, other: u16| {
        format!("protocol version is \"{side}\" here and \"{other}\" there")
    };
    let (mut client, mut hello) = Handshake::client(&Secret::new(b"secret"), "server").unwrap();
    let mut server = Handshake::server(&Secret::new(b"secret"), "client").unwrap();
    hello[5..7].copy_from_slice(&older.to_le_bytes());
    let Ok(Step::Refuse(refusal, error)) = server.frame(&hello, &who, |_| Ok(())) else {
        panic!("not refused")
    };
    assert!(
        error
            .to_string()
            .contains(&versions(PROTOCOL_VERSION, older))
    );
    let at_client = client.frame(&refusal, &who, |_| Ok(())).unwrap_err();
    assert!(
        at_client
            .to_string()
            .contains(&versions(older, PROTOCOL_VERSION))
    );
    let (mut client, _) = Handshake::client(&Secret::new(b"secret"), "server").unwrap();
    let challenge = [&[CHALLENGE][..], &older.to_le_bytes(), &[7; 32]].concat();
    let error = client.frame(&challenge, &who, |_| Ok(())).unwrap_err();
    assert!(
        error
            .to_string()
            .contains(&versions(PROTOCOL_VERSION, older))
    );
}

#[test]
fn a_refusal_of_the_service_reaches_the_client() {
    let who = identity("float32");
    let (client, _) = converse([b"t", b"t"], [&who, &who], |_| {
        Err("already has a sender".to_owned())
    });
    assert!(
        client
            .unwrap_err()
            .to_string()
            .contains("already has a sender")
    );
}

#[test]
fn a_recorded_proof_is_worthless_in_another_session() {
    let who = identity("float32");
    let (mut client, hello) = Handshake::client(&Secret::new(b"t"), "server").unwrap();
    let mut first = Handshake::server(&Secret::new(b"t"), "client").unwrap();
    let Ok(Step::Continue(challenge)) = first.frame(&hello, &who, |_| Ok(())) else {
        panic!()
    };
    let Ok(Step::Continue(proof)) = client.frame(&challenge, &who, |_| Ok(())) else {
        panic!()
    };
    let mut second = Handshake::server(&Secret::new(b"t"), "client").unwrap();
    second.frame(&hello, &who, |_| Ok(())).unwrap();
    let replayed = second.frame(&proof, &who, |_| Ok(()));
    assert!(
        matches!(replayed, Ok(Step::Refuse(_, Error::Authentication(_)))),
        "{replayed:?}"
    );
}

#[test]
fn a_proof_that_is_sent_back_is_no_answer() {
    let who = identity("float32");
    let (mut client, hello) = Handshake::client(&Secret::new(b"t"), "server").unwrap();
    let mut server = Handshake::server(&Secret::new(b"t"), "client").unwrap();
    let Ok(Step::Continue(challenge)) = server.frame(&hello, &who, |_| Ok(())) else {
        panic!()
    };
    let Ok(Step::Continue(proof)) = client.frame(&challenge, &who, |_| Ok(())) else {
        panic!()
    };
    let reflected = client.frame(&proof, &who, |_| Ok(()));
    assert!(
        matches!(reflected, Err(Error::Authentication(_))),
        "{reflected:?}"
    );
}

/// The frames that a step sends, and whether the conversation may go on.
fn sent(step: Result<Step>) -> (Vec<Vec<u8>>, bool) {
    match step {
        Ok(Step::Continue(frame) | Step::Admitted { frame, .. }) => (vec![frame], true),
        Ok(Step::Refuse(frame, _)) => (vec![frame], false),
        Ok(Step::Ready(_)) => (vec![], true),
        Err(_) => (vec![], false),
    }
}

/// A server that has sent its challenge, and the client that it is for.
fn challenged(who: &Identity) -> (Handshake, Handshake, Vec<u8>) {
    let (client, hello) = Handshake::client(&Secret::new(b"t"), "server").unwrap();
    let mut server = Handshake::server(&Secret::new(b"t"), "client").unwrap();
    let (mut frames, _) = sent(server.frame(&hello, who, |_| Ok(())));
    (server, client, frames.remove(0))
}

#[test]
fn before_its_proof_a_stranger_gets_the_version_and_a_nonce_only() {
    let who = identity("float32");
    let (server, _, challenge) = challenged(&who);
    let expected = [
        &[CHALLENGE][..],
        &PROTOCOL_VERSION.to_le_bytes(),
        &server.nonce_server,
    ]
    .concat();
    assert_eq!(challenge, expected);
}

#[test]
fn nothing_but_the_proof_is_answered_before_the_challenge_has_passed() {
    let who = identity("float32");
    for kind in (0..=u8::MAX).filter(|kind| *kind != PROOF) {
        for len in [0, 32, 1024] {
            let (mut server, ..) = challenged(&who);
            let frame = [&[kind][..], &vec![0; len]].concat();
            let step = server.frame(&frame, &who, |_| panic!("kind {kind} was admitted"));
            assert_eq!(sent(step), (vec![], false), "kind {kind}");
        }
    }
}

#[test]
fn a_client_sends_no_identity_before_the_servers_proof() {
    let who = identity("float32");
    for kind in (0..=u8::MAX).filter(|kind| *kind != PROOF) {
        let (_, mut client, challenge) = challenged(&who);
        client.frame(&challenge, &who, |_| Ok(())).unwrap();
        let frame = [&[kind][..], &[0; 64]].concat();
        let step = client.frame(&frame, &who, |_| Ok(()));
        assert_eq!(sent(step), (vec![], false), "kind {kind}");
    }
}

#[test]
fn a_proof_that_differs_in_any_bit_is_refused_and_there_is_no_second_try() {
    let who = identity("float32");
    for bit in 0..256 {
        let (mut server, mut client, challenge) = challenged(&who);
        let (proof, _) = sent(client.frame(&challenge, &who, |_| Ok(())));
        let mut wrong = proof[0].clone();
        wrong[1 + bit / 8] ^= 1 << (bit % 8);
        let refused = sent(server.frame(&wrong, &who, |_| Ok(())));
        assert_eq!(refused, (vec![vec![REFUSED, 1]], false), "bit {bit}");
        let again = sent(server.frame(&proof[0], &who, |_| Ok(())));
        assert_eq!(again, (vec![], false), "bit {bit}");
    }
}

#[test]
fn an_identity_that_was_changed_on_the_way_is_refused_by_both_sides() {
    let who = identity("float32");
    let (mut server, mut client, challenge) = challenged(&who);
    let (proof, _) = sent(client.frame(&challenge, &who, |_| Ok(())));
    let (proof, _) = sent(server.frame(&proof[0], &who, |_| Ok(())));
    let (mut named, _) = sent(client.frame(&proof[0], &who, |_| Ok(())));
    let honest = named[0].clone();
    *named[0].last_mut().unwrap() ^= 1;
    let step = server.frame(&named[0], &who, |_| panic!("accepted"));
    assert!(matches!(step, Err(Error::Authentication(_))), "{step:?}");

    server.state = HandshakeState::ServerIdentity;
    let (mut welcome, _) = sent(server.frame(&honest, &who, |_| Ok(())));
    *welcome[0].last_mut().unwrap() ^= 1;
    let step = client.frame(&welcome[0], &who, |_| Ok(()));
    assert!(matches!(step, Err(Error::Authentication(_))), "{step:?}");
}

#[test]
fn no_nonce_comes_twice() {
    let mut nonces = std::collections::HashSet::new();
    for _ in 0..500 {
        let server = Handshake::server(&Secret::new(b"t"), "client").unwrap();
        let (client, hello) = Handshake::client(&Secret::new(b"t"), "server").unwrap();
        assert!(hello.ends_with(&client.nonce_client));
        assert!(nonces.insert(server.nonce_server));
        assert!(nonces.insert(client.nonce_client));
    }
}

proptest! {
    #[test]
    fn any_frames_give_steps_or_errors(frames: Vec<Vec<u8>>) {
        let who = identity("float32");
        let mut server = Handshake::server(&Secret::new(b"t"), "peer").unwrap();
        for frame in frames {
            let _ = server.frame(&frame, &who, |_| Ok(()));
        }
    }
}

#[test]
fn neither_side_of_a_handshake_nor_its_errors_and_frames_show_the_token() {
    let (secret, other) = (Secret::new(TOKEN), Secret::new(b"another"));
    let (mut client, hello) = Handshake::client(&secret, "server").unwrap();
    let mut server = Handshake::server(&other, "client").unwrap();
    let ours = Identity::new(SessionKind::Pipe, "", Vec::new()).unwrap();
    let mut shown = vec![format!("{client:?}{server:?}{hello:?}")];
    let mut frame = hello;
    for _ in 0..2 {
        for side in [&mut server, &mut client] {
            let step = side.frame(&frame, &ours, |_| Ok(()));
            shown.push(format!("{step:?}{side:#?}"));
            if let Ok(Step::Continue(next) | Step::Refuse(next, _)) = step {
                frame = next;
            }
        }
    }
    let shown = shown.concat();
    assert!(
        shown.contains("KVPIPE_TOKEN"),
        "the server refuses: {shown}"
    );
    assert_discloses_nothing(&shown);
}
