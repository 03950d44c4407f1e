use super::*;

const PEER: &str = "127.0.0.1:9";

/// A link that is being made.
fn connecting(io: &mut Io) -> LinkId {
    let link = io.new_link();
    let attempt = (PEER.to_owned(), io.now);
    io.connecting.insert(link, attempt);
    link
}

#[test]
fn a_peer_has_its_name_before_the_link_is_made_and_after_it_has_gone() {
    let mut io = Io::alone(None);
    let link = connecting(&mut io);
    assert_eq!(io.peer(link), PEER);
    assert!(io.end_attempt(link));
    assert_eq!(io.peer(link), PEER);
    let text = io.check_lender(link).unwrap_err().to_string();
    assert!(text.starts_with("lost peer 127.0.0.1:9: "), "{text}");
}

#[test]
fn only_the_latest_links_that_are_gone_are_remembered() {
    let mut io = Io::alone(None);
    let links: Vec<_> = (0..=GONE_CAP).map(|_| connecting(&mut io)).collect();
    for link in &links {
        io.end_attempt(*link);
    }
    assert_eq!(io.gone.len(), GONE_CAP);
    assert_eq!(io.peer(links[GONE_CAP]), PEER);
}

#[test]
fn an_attempt_ends_once() {
    let mut io = Io::alone(None);
    let link = connecting(&mut io);
    assert!(io.end_attempt(link));
    assert!(!io.end_attempt(link));
}
