use super::*;

const PEER: &str = "127.0.0.1:9";

/// A session that is being made.
fn connecting(cx: &mut ReactorContext) -> SessionKey {
    let session = cx.new_session();
    let attempt = (PEER.to_owned(), cx.now);
    cx.connecting.insert(session, attempt);
    session
}

#[test]
fn a_peer_has_its_name_before_the_link_is_made_and_after_it_has_gone() {
    let mut cx = ReactorContext::manual(None);
    let session = connecting(&mut cx);
    assert_eq!(cx.peer(session), PEER);
    assert!(cx.end_attempt(session));
    assert_eq!(cx.peer(session), PEER);
    let text = cx.check_still_exposed(session).unwrap_err().to_string();
    assert!(text.starts_with("lost peer 127.0.0.1:9: "), "{text}");
}

#[test]
fn only_the_latest_links_that_are_gone_are_remembered() {
    let mut cx = ReactorContext::manual(None);
    let sessions: Vec<_> = (0..=GONE_CAP).map(|_| connecting(&mut cx)).collect();
    for session in &sessions {
        cx.end_attempt(*session);
    }
    assert_eq!(cx.gone.len(), GONE_CAP);
    assert_eq!(cx.peer(sessions[GONE_CAP]), PEER);
}

#[test]
fn an_attempt_ends_once() {
    let mut cx = ReactorContext::manual(None);
    let session = connecting(&mut cx);
    assert!(cx.end_attempt(session));
    assert!(!cx.end_attempt(session));
}
