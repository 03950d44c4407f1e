use std::time::Duration;

use super::*;
use crate::net::encryption::Encryption;
use crate::net::identity::SessionKind;
use crate::net::secret::Secrets;
use crate::session::Streams;

impl Links {
    /// A context without a reactor.
    pub(crate) fn manual(context: Option<Context>) -> Self {
        let identity = Identity::new(SessionKind::Control, "", Vec::new());
        let config = ReactorConfig {
            listen: None,
            secrets: Secrets::new(b""),
            encryption: Encryption::Off,
            streams: Streams::default(),
            identity: identity.expect("identity"),
            transport: None,
            timeouts: SessionTimeouts::default(),
            busy_poll: Duration::ZERO,
        };
        let poller = Arc::new(Poller::new().expect("poller"));
        let context = context.map(Arc::new);
        Self::new(config, context, poller, PendingReads::default()).expect("links")
    }

    /// The context of a reactor whose data plane has ended, but not so many of its reads.
    pub(crate) fn with_pending_reads(reads: usize) -> Self {
        let links = Self::manual(None);
        links.pending_reads().pretend(reads);
        links
    }

    /// The next round is so much later.
    pub(crate) fn advance(&mut self, by: Duration) {
        self.now += by;
    }
}

const PEER: &str = "127.0.0.1:9";

/// A session that is being made.
fn connecting(links: &mut Links) -> SessionKey {
    let (now, timeouts) = (links.now(), links.timeouts());
    links.add(Session::new(PEER.to_owned(), false, now, timeouts))
}

#[test]
fn a_peer_has_its_name_before_the_session_is_up_and_after_it_has_gone() {
    let mut links = Links::manual(None);
    let session = connecting(&mut links);
    assert_eq!(links.peer(session), PEER);
    assert!(links.remove(session).is_some());
    assert_eq!(links.peer(session), PEER);
    let text = links.check_still_exposed(session).unwrap_err().to_string();
    assert!(text.starts_with("lost peer 127.0.0.1:9: "), "{text}");
}

#[test]
fn only_the_latest_sessions_that_are_gone_are_remembered() {
    let mut links = Links::manual(None);
    let sessions: Vec<_> = (0..=ENDED_CAP).map(|_| connecting(&mut links)).collect();
    for session in &sessions {
        links.remove(*session);
    }
    assert_eq!(links.ended_peers.len(), ENDED_CAP);
    assert_eq!(links.peer(sessions[ENDED_CAP]), PEER);
}

#[test]
fn the_first_of_several_errors_of_a_session_counts() {
    let mut links = Links::manual(None);
    let session = connecting(&mut links);
    links.close(session, "first");
    links.close(session, "second");
    assert_eq!(links.failed, [session]);
    let failure = links.sessions[&session].failure.as_ref();
    assert_eq!(failure, Some(&Error::Closed("first".to_owned())));
}
