use std::sync::atomic::{AtomicUsize, Ordering};

use super::frames::{IDENTITY, REFUSED, REPLY};
use super::*;
use crate::net::identity::SessionKind;
use crate::net::record::TAG_LEN;
use crate::net::secret::Tokens;
use crate::net::secret::tests::{TOKEN, assert_discloses_nothing};
use proptest::prelude::*;

const SHARED: &[u8] = b"a token of both";
const OTHER: &[u8] = b"another token";

fn identity(dtype: &str) -> Identity {
    let fields = vec![("dtype".to_owned(), dtype.to_owned())];
    Identity::new(SessionKind::Pipe, "engine", fields).unwrap()
}

/// The offer of a side on a host of this name, seen over loopback.
fn offer(encryption: Encryption, host: &str) -> EncryptionOffer {
    EncryptionOffer {
        encryption,
        is_loopback: true,
        host: host.to_owned(),
    }
}

fn auto() -> EncryptionOffer {
    offer(Encryption::Auto, "one host")
}

fn client(token: &[u8], ours: EncryptionOffer) -> (Handshake, Vec<u8>) {
    Handshake::client(&Secrets::new(token), ours, "server").unwrap()
}

fn server(token: &[u8], ours: EncryptionOffer) -> Handshake {
    Handshake::server(&Secrets::new(token), ours, "client")
}

/// Sides of an unfinished handshake, and the frame that comes next.
struct Conversation {
    client: Handshake,
    server: Handshake,
    frame: Vec<u8>,
    who: Identity,
}

impl Conversation {
    fn new(tokens: [&[u8]; 2], offers: [EncryptionOffer; 2]) -> Self {
        let [ours, theirs] = offers;
        let (client, frame) = client(tokens[0], ours);
        Self {
            client,
            server: server(tokens[1], theirs),
            frame,
            who: identity("float32"),
        }
    }

    /// Both sides hold the token.
    fn honest() -> Self {
        Self::new([SHARED, SHARED], [auto(), auto()])
    }

    fn at_server(&mut self) -> Result<Step> {
        let mut frame = self.frame.clone();
        self.server.frame(&mut frame, &self.who, |_| Ok(()))
    }

    fn at_client(&mut self) -> Result<Step> {
        let mut frame = self.frame.clone();
        self.client.frame(&mut frame, &self.who, |_| Ok(()))
    }

    /// The client's IDENTITY is next.
    fn replied(mut self) -> Self {
        self.frame = sent(self.at_server()).0;
        self.frame = sent(self.at_client()).0;
        assert_eq!(self.frame[0], IDENTITY);
        self
    }
}

/// The frame that a step sends, or none, and whether the conversation may go on.
fn sent(step: Result<Step>) -> (Vec<u8>, bool) {
    match step {
        Ok(Step::Continue(frame) | Step::Admitted { frame, .. } | Step::Joined(Some(frame))) => {
            (frame, true)
        }
        Ok(Step::Refuse(frame, _)) => (frame, false),
        Ok(Step::Ready(_) | Step::Joined(None) | Step::AskedToJoin(_)) => (vec![], true),
        Err(_) => (vec![], false),
    }
}

/// Outcome of a handshake on a side: keys, or none because frames stay plain.
type Outcome = Result<Option<Records>>;

/// Runs both sides against each other; how each ends: client, server.
fn converse(
    (mut client, hello): (Handshake, Vec<u8>),
    mut server: Handshake,
    ours: [&Identity; 2],
    accept: impl Fn(&Identity) -> std::result::Result<(), String>,
) -> [Outcome; 2] {
    let mut frame = hello;
    let mut errors = [None, None];
    for turn in 0.. {
        let at = usize::from(turn % 2 == 0);
        let side = if at == 1 { &mut server } else { &mut client };
        match side.frame(&mut frame, ours[at], |peer| accept(peer)) {
            Ok(Step::Continue(next) | Step::Admitted { frame: next, .. }) => frame = next,
            Ok(Step::Ready(_) | Step::AskedToJoin(_) | Step::Joined(_)) => break,
            Ok(Step::Refuse(next, error)) => {
                errors[at] = Some(error);
                frame = next;
            }
            Err(error) => {
                errors[at] = Some(error);
                break;
            }
        }
    }
    let [at_client, at_server] = errors;
    let outcome = |error: Option<Error>, side: Handshake| match error {
        Some(error) => Err(error),
        None => Ok(side.into_records()),
    };
    [outcome(at_client, client), outcome(at_server, server)]
}

fn between(tokens: [&[u8]; 2], offers: [EncryptionOffer; 2]) -> [Outcome; 2] {
    let ([ours, theirs], who) = (offers, identity("float32"));
    let server = server(tokens[1], theirs);
    converse(client(tokens[0], ours), server, [&who, &who], |_| Ok(()))
}

#[test]
fn each_side_learns_who_the_other_is() {
    let mut talk = Conversation::honest().replied();
    let Ok(Step::Admitted { frame, .. }) = talk.at_server() else {
        panic!("not admitted")
    };
    talk.frame = frame;
    let Ok(Step::Admitted { frame, peer }) = talk.at_client() else {
        panic!("not admitted")
    };
    assert_eq!(*peer.unwrap(), talk.who);
    talk.frame = frame;
    assert!(matches!(talk.at_server(), Ok(Step::Ready(peer)) if *peer == talk.who));
}

/// Computed by another implementation, in Python with `hmac` and the primitives of `cryptography`, from wire-format.md.
#[test]
fn the_handshake_has_the_known_bytes() {
    let token = Secrets::new(b"a token of the known answer");
    let side = |encryption, host: &str| EncryptionOffer {
        encryption,
        is_loopback: false,
        host: host.to_owned(),
    };
    let who = |byte, engine, host: &str| Identity {
        incarnation: [byte; 16],
        host: host.to_owned(),
        ..Identity::new(SessionKind::Control, engine, Vec::new()).unwrap()
    };
    let of_client = side(Encryption::Auto, "client-host");
    let noise = Noise::fixed(token.current(), true, [0x11; 32]);
    let (mut client, hello) = Handshake::greet(noise, of_client, "server").unwrap();
    assert_eq!(hex(&hello), HELLO_HEX);
    let mut server = Handshake::server(&token, side(Encryption::On, "server-host"), "client");
    let mut noise = Noise::fixed(token.current(), false, [0x22; 32]);
    let offer = noise.read(&hello[7..]).unwrap();
    let Ok(Step::Continue(mut reply)) = server.greeted(noise, &offer) else {
        panic!("no reply")
    };
    assert_eq!(hex(&reply), REPLY_HEX);
    let of_client = who(0x33, "client", "client-host");
    let step = client.frame(&mut reply, &of_client, |_| Ok(()));
    assert_eq!(hex(&sent(step).0), IDENTITY_HEX);
    let of_server = who(0x44, "server", "server-host");
    let body = of_server.write(Writer::default()).finish();
    let mut welcome = server.seal(&HandshakeFrame::Welcome(&body)).unwrap();
    assert_eq!(hex(&welcome), WELCOME_HEX);
    let step = client.frame(&mut welcome, &of_client, |_| Ok(()));
    assert_eq!(hex(&sent(step).0), READY_HEX);
    let (mut heartbeat, mut records) = (Vec::new(), server.into_records().unwrap());
    records.sealer.seal(&[32], &mut heartbeat).unwrap();
    assert_eq!(hex(&heartbeat), HEARTBEAT_HEX);
    let secret = client.join_secret().unwrap();
    let mut initiator = Noise::fixed(&secret.of_connection(7), true, [0x55; 32]);
    let message = initiator.write(&[]).unwrap();
    let join = HandshakeFrame::Join(secret.session_id(), 7, Greeting::new(&message));
    assert_eq!(hex(&join.encode()), JOIN_HEX);
    let mut responder = Noise::fixed(&secret.of_connection(7), false, [0x66; 32]);
    assert!(responder.read(&message).is_some());
    let message = responder.write(&[]).unwrap();
    let reply = HandshakeFrame::Reply(Greeting::new(&message));
    assert_eq!(hex(&reply.encode()), JOIN_REPLY_HEX);
    assert!(initiator.read(&message).is_some());
    let (mut ready, (mut records, _)) = (Vec::new(), initiator.into_keys());
    records.sealer.seal(&[6], &mut ready).unwrap();
    assert_eq!(hex(&ready), JOIN_READY_HEX);
    let mut records = client.into_records().unwrap();
    let opened = records.opener.open(&mut heartbeat);
    assert_eq!(opened, Ok(&[32][..]));
}

pub(in crate::net) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

const JOIN_HEX: &str = "084b5650500f0009fcf98715a5961bb106aa63fa69864b0700000038ab664bd86f77d7e66bdd9ae0792913a94fd8b33a1260027e4b46c1f4884c67eb61fa3b2d8e4a925f4b1fe188c090bd";
const JOIN_REPLY_HEX: &str = "020f00219e4d800da968d2a5fcb009c784f4746c7138edb9ee4844b739e830b05cf424e49323edd887c3cfee6500c380aa1b59";
const JOIN_READY_HEX: &str = "067d82aa23340c1413918f853514d460aa";
const HELLO_HEX: &str = "014b5650500f007b4e909bbe7ffe44c465a220037d608ee35897d31ef972f07f74892cb0f73f1363473d95ffaf0a1187cc0023ad2a697f22cf40e02e29fec6b0a7642d88fddec9f6";
const REPLY_HEX: &str = "020f000faa684ed28867b97f4a6a2dee5df8ce974e76b7018e3f22a1c4cf2678570f20e4eb41e490ca25480b920bff8c435bda66790eced6aaeb95bb1a11d24f9980f1e4";
const IDENTITY_HEX: &str = "04f229045d4c84a03a35aa125bbe9a3385792dacbba76537bed4e30dba4d389c2563b451dea2a7404eb2a17c51451d779f515a74b427f1867792cd7966e4fc34768136c5";
const WELCOME_HEX: &str = "05f529b167386edf9b5af9021dba75ebf134951629e9bdde375cccd81ce406aeb770f5b5f988b80fc5a3688c6625246f1d04a618ff0cfe5cf4f65fdcec425f0e95ad8f34";
const READY_HEX: &str = "060e31b0750fb7106f6e836ab3b9cbd730";
const HEARTBEAT_HEX: &str = "20e2573644919bc688bff95e387443fbb6";

#[test]
fn a_wrong_token_is_refused_on_both_sides_and_the_refusal_is_a_hint_only() {
    let [client, server] = between([SHARED, OTHER], [auto(), auto()]);
    assert!(
        matches!(server, Err(Error::Authentication(_))),
        "{server:?}"
    );
    let Err(Error::Authentication(text)) = client else {
        panic!("{client:?}")
    };
    assert!(
        text.contains("KVPIPE_TOKEN") && text.contains("not authenticated"),
        "{text}"
    );
}

#[test]
fn a_listener_with_two_tokens_accepts_both_and_no_other() {
    let tokens = Tokens {
        current: SHARED,
        next: Some(OTHER),
    };
    let who = identity("float32");
    for (token, is_accepted) in [(SHARED, true), (OTHER, true), (&b"a third one"[..], false)] {
        let server = Handshake::server(&Secrets::new(tokens), auto(), "client");
        let outcomes = converse(client(token, auto()), server, [&who, &who], |_| Ok(()));
        for outcome in outcomes {
            assert_eq!(outcome.is_ok(), is_accepted, "{outcome:?}");
        }
    }
}

#[test]
fn a_side_without_a_token_and_one_with_refuse_each_other() {
    for tokens in [[SHARED, b""], [b"", SHARED]] {
        let [client, server] = between(tokens, [auto(), auto()]);
        assert!(client.is_err() && server.is_err());
    }
    let [client, server] = between([b"", b""], [auto(), auto()]);
    assert!(client.is_ok() && server.is_ok());
}

/// Counts the key agreements of X25519.
struct Counting(
    std::sync::Arc<AtomicUsize>,
    snow::resolvers::DefaultResolver,
);

struct CountingDh(std::sync::Arc<AtomicUsize>, Box<dyn snow::types::Dh>);

impl snow::resolvers::CryptoResolver for Counting {
    fn resolve_rng(&self) -> Option<Box<dyn snow::types::Random>> {
        self.1.resolve_rng()
    }
    fn resolve_dh(&self, choice: &snow::params::DHChoice) -> Option<Box<dyn snow::types::Dh>> {
        let counted = CountingDh(self.0.clone(), self.1.resolve_dh(choice)?);
        Some(Box::new(counted))
    }
    fn resolve_hash(
        &self,
        choice: &snow::params::HashChoice,
    ) -> Option<Box<dyn snow::types::Hash>> {
        self.1.resolve_hash(choice)
    }
    fn resolve_cipher(
        &self,
        choice: &snow::params::CipherChoice,
    ) -> Option<Box<dyn snow::types::Cipher>> {
        self.1.resolve_cipher(choice)
    }
}

impl snow::types::Dh for CountingDh {
    fn name(&self) -> &'static str {
        self.1.name()
    }
    fn pub_len(&self) -> usize {
        self.1.pub_len()
    }
    fn priv_len(&self) -> usize {
        self.1.priv_len()
    }
    fn set(&mut self, privkey: &[u8]) {
        self.1.set(privkey);
    }
    fn generate(
        &mut self,
        rng: &mut dyn snow::types::Random,
    ) -> std::result::Result<(), snow::Error> {
        self.1.generate(rng)
    }
    fn pubkey(&self) -> &[u8] {
        self.1.pubkey()
    }
    fn privkey(&self) -> &[u8] {
        self.1.privkey()
    }
    fn dh(&self, pubkey: &[u8], out: &mut [u8]) -> std::result::Result<(), snow::Error> {
        self.0.fetch_add(1, Ordering::Relaxed);
        self.1.dh(pubkey, out)
    }
}

#[test]
fn nothing_is_computed_with_a_strangers_public_key_before_its_tag_is_right() {
    let num_agreements = |token| {
        let (_, hello) = client(token, auto());
        let count = std::sync::Arc::new(AtomicUsize::new(0));
        let (secrets, prologue) = (Secrets::new(SHARED), noise::prologue());
        let resolver = Counting(count.clone(), snow::resolvers::DefaultResolver);
        let pattern = noise::PATTERN.parse().unwrap();
        let builder = snow::Builder::with_resolver(pattern, Box::new(resolver));
        let builder = builder.prologue(&prologue).unwrap();
        let builder = builder.psk(0, secrets.current().key()).unwrap();
        let mut responder = builder.build_responder().unwrap();
        let read = responder.read_message(&hello[7..], &mut [0; 256]);
        if read.is_ok() {
            responder.write_message(&[], &mut [0; 256]).unwrap();
        }
        count.load(Ordering::Relaxed)
    };
    assert_eq!(num_agreements(OTHER), 0);
    assert_eq!(num_agreements(SHARED), 1);
}

#[test]
fn frames_are_sealed_between_hosts_and_where_a_side_wants_it_and_the_keys_fit() {
    let cases = [
        (auto(), auto(), false),
        (auto(), offer(Encryption::Auto, "another host"), true),
        (auto(), offer(Encryption::On, "one host"), true),
        (auto(), offer(Encryption::Off, "one host"), false),
    ];
    for (ours, theirs, is_sealed) in cases {
        for offers in [
            [ours.clone(), theirs.clone()],
            [theirs.clone(), ours.clone()],
        ] {
            let keys = between([SHARED, SHARED], offers).map(Result::unwrap);
            if !is_sealed {
                assert!(keys.iter().all(Option::is_none));
                continue;
            }
            let [Some(mut client), Some(mut server)] = keys else {
                panic!("no keys")
            };
            let mut sealed = Vec::new();
            client.sealer.seal(b"!frame", &mut sealed).unwrap();
            assert_eq!(server.opener.open(&mut sealed), Ok(&b"!frame"[..]));
            sealed.clear();
            server.sealer.seal(b"!frame", &mut sealed).unwrap();
            assert_eq!(client.opener.open(&mut sealed), Ok(&b"!frame"[..]));
        }
    }
}

#[test]
fn encryption_that_one_side_refuses_is_named_with_both_values_on_both_sides() {
    let (on, off) = (
        offer(Encryption::On, "one host"),
        offer(Encryption::Off, "one host"),
    );
    let far = offer(Encryption::Auto, "another host");
    for (ours, theirs) in [(on.clone(), off.clone()), (off.clone(), on), (off, far)] {
        let named = |side: &EncryptionOffer, other: &EncryptionOffer| {
            let (side, other) = (side.encryption, other.encryption);
            format!("encryption is \"{side}\" here and \"{other}\" there")
        };
        let [at_client, at_server] =
            between([SHARED, SHARED], [ours.clone(), theirs.clone()]).map(Result::unwrap_err);
        let texts = [at_client.to_string(), at_server.to_string()];
        assert!(texts[0].contains(&named(&ours, &theirs)), "{texts:?}");
        assert!(texts[1].contains(&named(&theirs, &ours)), "{texts:?}");
        assert!(!texts[1].contains("not authenticated"), "{texts:?}");
    }
}

#[test]
fn where_encryption_differs_a_client_sends_no_identity_and_a_server_takes_none() {
    let offers = || {
        [
            offer(Encryption::Off, "one host"),
            offer(Encryption::On, "one host"),
        ]
    };
    let mut talk = Conversation::new([SHARED, SHARED], offers());
    talk.frame = sent(talk.at_server()).0;
    let (frame, goes_on) = sent(talk.at_client());
    assert_eq!((frame[0], goes_on), (REFUSED, false));

    // A client that does not keep to that.
    let [ours, theirs] = offers();
    let mut noise = Noise::initiator(Secrets::new(SHARED).current()).unwrap();
    let message = noise
        .write(&ours.write(Writer::default()).finish())
        .unwrap();
    let mut hello = HandshakeFrame::Hello(Greeting::new(&message)).encode();
    let (mut server, who) = (server(SHARED, theirs), identity("float32"));
    let accept = |_: &Identity| -> std::result::Result<(), String> { panic!("accepted") };
    let reply = sent(server.frame(&mut hello, &who, accept)).0;
    noise.read(&reply[3..]).unwrap();
    let body = who.write(Writer::new(IDENTITY)).finish();
    let mut record = Vec::new();
    let (mut records, _) = noise.into_keys();
    records.sealer.seal(&body, &mut record).unwrap();
    let step = server.frame(&mut record, &who, accept);
    assert!(
        matches!(step, Ok(Step::Refuse(_, Error::Incompatible { .. }))),
        "{step:?}"
    );
}

#[test]
fn no_byte_of_either_greeting_can_be_changed_on_the_way() {
    let (mut num_hello, mut num_reply) = (0, 0);
    for at in 7..Conversation::honest().frame.len() {
        let mut talk = Conversation::honest();
        talk.frame[at] ^= 1;
        let step = talk.at_server();
        assert!(
            matches!(step, Ok(Step::Refuse(_, Error::Authentication(_)))),
            "{at}"
        );
        num_hello += 1;
    }
    let reply_len = sent(Conversation::honest().at_server()).0.len();
    for at in 3..reply_len {
        let mut talk = Conversation::honest();
        talk.frame = sent(talk.at_server()).0;
        talk.frame[at] ^= 1;
        let step = talk.at_client();
        assert!(
            matches!(step, Err(Error::Authentication(_))),
            "{at}: {step:?}"
        );
        num_reply += 1;
    }
    // A public key, encryption, loopback, boot id and tag.
    let len = 32 + 1 + 1 + 4 + "one host".len() + TAG_LEN;
    assert_eq!((num_hello, num_reply), (len, len));
}

#[test]
fn a_greeting_that_is_cut_is_refused() {
    for len in 7..Conversation::honest().frame.len() {
        let mut talk = Conversation::honest();
        talk.frame.truncate(len);
        let step = talk.at_server();
        assert!(
            matches!(step, Ok(Step::Refuse(_, Error::Authentication(_)))),
            "{len}"
        );
    }
}

#[test]
fn a_first_message_that_is_played_again_leads_to_nothing() {
    let talk = Conversation::honest();
    let hello = talk.frame.clone();
    let recorded = talk.replied().frame;
    let mut second = server(SHARED, auto());
    let who = identity("float32");
    let accept = |_: &Identity| -> std::result::Result<(), String> { panic!("accepted") };
    let step = second.frame(&mut hello.clone(), &who, accept);
    assert!(matches!(step, Ok(Step::Continue(_))), "{step:?}");
    assert_eq!(second.progress(), HandshakeProgress::Greeted);
    for mut replayed in [recorded, hello] {
        let mut replaying = server(SHARED, auto());
        replaying.frame(&mut talk_hello(), &who, accept).unwrap();
        let step = replaying.frame(&mut replayed, &who, accept);
        assert!(matches!(step, Err(Error::Authentication(_))), "{step:?}");
    }
}

fn talk_hello() -> Vec<u8> {
    client(SHARED, auto()).1
}

#[test]
fn a_peer_that_returns_our_own_bytes_is_no_peer() {
    // To a client: its HELLO, as HELLO and as REPLY.
    let (mut ours, hello) = client(SHARED, auto());
    let who = identity("float32");
    let step = ours.frame(&mut hello.clone(), &who, |_| Ok(()));
    assert!(matches!(step, Err(Error::Protocol(_))), "{step:?}");
    let (mut ours, hello) = client(SHARED, auto());
    let mut reply = [&[REPLY][..], &hello[5..]].concat();
    let step = ours.frame(&mut reply, &who, |_| Ok(()));
    assert!(matches!(step, Err(Error::Authentication(_))), "{step:?}");
    // To either side, its own record.
    let mut talk = Conversation::honest().replied();
    let step = talk.at_client();
    assert!(matches!(step, Err(Error::Authentication(_))), "{step:?}");
    let mut talk = Conversation::honest().replied();
    talk.frame = sent(talk.at_server()).0;
    let step = talk.at_server();
    assert!(matches!(step, Err(Error::Authentication(_))), "{step:?}");
}

#[test]
fn a_different_fingerprint_names_the_field_and_each_sides_values() {
    let (ours, theirs) = (identity("float32"), identity("bfloat16"));
    let server = server(SHARED, auto());
    let outcomes = converse(client(SHARED, auto()), server, [&ours, &theirs], |_| Ok(()));
    let [client, server] = outcomes.map(|outcome| outcome.unwrap_err().to_string());
    let expected = "dtype is \"float32\" here and \"bfloat16\" there";
    assert!(client.contains(expected), "{client}");
    assert!(!client.contains("not authenticated"), "{client}");
    let expected = "dtype is \"bfloat16\" here and \"float32\" there";
    assert!(server.contains(expected), "{server}");
}

/// HELLO is type, magic, version, message; REPLY is type, version, message. Version 8 had nonces of 32 bytes.
#[test]
fn a_peer_of_another_version_is_refused_with_both_versions_named_on_both_sides() {
    let (older, who) = (8u16, identity("float32"));
    let versions = |side: u16, other: u16| {
        format!("protocol version is \"{side}\" here and \"{other}\" there")
    };
    let ours = versions(PROTOCOL_VERSION, older);
    let mut hello = [b"\x01KVPP", &older.to_le_bytes()[..], &[7; 32]].concat();
    let mut newer = server(SHARED, auto());
    let Ok(Step::Refuse(refusal, error)) = newer.frame(&mut hello, &who, |_| Ok(())) else {
        panic!("not refused")
    };
    assert!(error.to_string().contains(&ours), "{error}");
    let text = |text: &str| [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    let as_before = [
        vec![REFUSED, 2],
        text("protocol version"),
        text("8"),
        text(&PROTOCOL_VERSION.to_string()),
    ];
    assert_eq!(refusal, as_before.concat());
    // The refusal of an old server, and a challenge.
    let mut refusal = [
        vec![REFUSED, 2],
        text("protocol version"),
        text(&PROTOCOL_VERSION.to_string()),
        text("8"),
    ]
    .concat();
    let mut challenge = [&[REPLY][..], &older.to_le_bytes(), &[7; 32]].concat();
    for frame in [&mut refusal, &mut challenge] {
        let (mut newer, _) = client(SHARED, auto());
        let error = newer.frame(frame, &who, |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains(&ours), "{error}");
    }
}

#[test]
fn a_refusal_of_the_service_reaches_the_client() {
    let who = identity("float32");
    let refused = |_: &Identity| Err("already has a sender".to_owned());
    let server = server(SHARED, auto());
    let [client, _] = converse(client(SHARED, auto()), server, [&who, &who], refused);
    let error = client.unwrap_err().to_string();
    assert!(error.contains("already has a sender"), "{error}");
}

#[test]
fn nothing_but_the_first_record_is_answered_before_it_has_opened() {
    let who = identity("float32");
    for kind in 0..=u8::MAX {
        for len in [0, 32, 1024] {
            let mut talk = Conversation::honest();
            talk.at_server().unwrap();
            let mut frame = [&[kind][..], &vec![0; len]].concat();
            let accept = |_: &Identity| panic!("kind {kind} was admitted");
            let step = talk.server.frame(&mut frame, &who, accept);
            assert_eq!(sent(step), (vec![], false), "kind {kind}");
        }
    }
}

#[test]
fn a_client_sends_no_identity_before_the_servers_proof() {
    let who = identity("float32");
    for kind in 0..=u8::MAX {
        let (mut client, _) = client(SHARED, auto());
        let mut frame = [&[kind][..], &PROTOCOL_VERSION.to_le_bytes(), &[0; 64]].concat();
        let step = client.frame(&mut frame, &who, |_| Ok(()));
        assert_eq!(sent(step), (vec![], false), "kind {kind}");
    }
}

#[test]
fn a_record_of_the_handshake_that_differs_in_any_byte_ends_it_and_there_is_no_second_try() {
    let len = Conversation::honest().replied().frame.len();
    for at in 0..len {
        let mut talk = Conversation::honest().replied();
        let honest = talk.frame.clone();
        talk.frame[at] ^= 1;
        let step = talk.at_server();
        assert!(
            matches!(step, Err(Error::Authentication(_))),
            "byte {at}: {step:?}"
        );
        talk.frame = honest;
        assert_eq!(sent(talk.at_server()), (vec![], false), "byte {at}");
    }
}

#[test]
fn a_welcome_that_was_changed_on_the_way_is_refused() {
    let mut talk = Conversation::honest().replied();
    talk.frame = sent(talk.at_server()).0;
    *talk.frame.last_mut().unwrap() ^= 1;
    let step = talk.at_client();
    assert!(matches!(step, Err(Error::Authentication(_))), "{step:?}");
}

#[test]
fn no_ephemeral_key_comes_twice() {
    let mut keys = std::collections::HashSet::new();
    for _ in 0..200 {
        let mut talk = Conversation::honest();
        assert!(keys.insert(talk.frame[7..39].to_vec()));
        let reply = sent(talk.at_server()).0;
        assert!(keys.insert(reply[3..35].to_vec()));
    }
}

proptest! {
    #[test]
    fn any_frames_give_steps_or_errors(frames: Vec<Vec<u8>>) {
        let who = identity("float32");
        let mut server = server(SHARED, auto());
        for mut frame in frames {
            let _ = server.frame(&mut frame, &who, |_| Ok(()));
        }
    }
}

#[test]
fn neither_side_of_a_handshake_nor_its_errors_and_frames_show_the_token() {
    for token in [TOKEN, OTHER] {
        let (mut client, hello) = client(TOKEN, auto());
        let mut server = server(token, auto());
        let ours = Identity::new(SessionKind::Pipe, "", Vec::new()).unwrap();
        let mut shown = vec![format!("{client:?}{server:?}{hello:?}")];
        let mut frame = hello;
        for _ in 0..2 {
            for side in [&mut server, &mut client] {
                let step = side.frame(&mut frame, &ours, |_| Ok(()));
                shown.push(format!("{step:?}{side:#?}"));
                if let Ok(Step::Continue(next) | Step::Admitted { frame: next, .. }) = &step {
                    frame = next.clone();
                }
                if let Ok(Step::Refuse(next, _)) = step {
                    frame = next;
                }
            }
        }
        let shown = shown.concat();
        let is_refused = shown.contains("KVPIPE_TOKEN");
        assert_eq!(is_refused, token == OTHER, "{shown}");
        assert_discloses_nothing(&shown);
    }
}

/// A session with its keys at both sides, and the frame with which a connection asks to join it.
fn joining(number: u32) -> ([JoinSecret; 2], Handshake, Vec<u8>) {
    let mut talk = Conversation::honest().replied();
    sent(talk.at_server());
    let secrets = [&talk.client, &talk.server].map(|side| side.join_secret().unwrap());
    let (client, join) = Handshake::joining(&secrets[0], number, true, "server").unwrap();
    (secrets, client, join)
}

/// The request in the first frame of a connection.
fn asked(server: &mut Handshake, join: &[u8]) -> JoinRequest {
    let step = server.frame(&mut join.to_vec(), &identity("float32"), |_| Ok(()));
    match step {
        Ok(Step::AskedToJoin(request)) => request,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_further_connection_joins_its_session_with_keys_of_its_own() {
    let mut keys = Vec::new();
    for number in [0, 1] {
        let ([ours, theirs], mut client, join) = joining(number);
        let (mut server, who) = (server(b"another token", auto()), identity("float32"));
        let request = asked(&mut server, &join);
        assert_eq!(request.session, theirs.session_id());
        assert_eq!(ours.session_id(), theirs.session_id());
        assert_eq!(server.progress(), HandshakeProgress::Greeted);
        let mut reply = sent(server.join(Some((&theirs, true)), &request)).0;
        let step = client.frame(&mut reply, &who, |_| Ok(()));
        let Ok(Step::Joined(Some(mut ready))) = step else {
            panic!("{step:?}")
        };
        // The request may have been played again: READY proves the secret.
        assert_eq!(server.progress(), HandshakeProgress::Greeted);
        let step = server.frame(&mut ready, &who, |_| Ok(()));
        assert!(matches!(step, Ok(Step::Joined(None))), "{step:?}");
        assert_eq!(server.progress(), HandshakeProgress::Proved);
        let mut record = Vec::new();
        let mut sealer = client.into_records().unwrap().sealer;
        sealer.seal(b"\x20 the same for both", &mut record).unwrap();
        keys.push(record.clone());
        let mut opener = server.into_records().unwrap().opener;
        assert_eq!(opener.open(&mut record).unwrap(), b"\x20 the same for both");
    }
    assert_ne!(keys[0], keys[1]);
}

#[test]
fn a_connection_does_not_join_another_session_nor_under_another_number_nor_by_a_replay() {
    let (mut server, who) = (server(SHARED, auto()), identity("float32"));
    let ([_, theirs], _, join) = joining(7);
    let request = asked(&mut server, &join);
    let [_, of_another] = joining(7).0;
    for unknown in [None, Some((&of_another, true))] {
        let step = server.join(unknown, &request);
        let Ok(Step::Refuse(_, Error::Connect(_))) = step else {
            panic!("{step:?}")
        };
    }
    let other_number = JoinRequest {
        number: 8,
        message: request.message.clone(),
        ..request
    };
    for (request, goes_on) in [(&other_number, false), (&request, true)] {
        let step = server.join(Some((&theirs, true)), request);
        assert_eq!(sent(step).1, goes_on);
    }
    for played in [join, vec![6], vec![6; 17]] {
        let mut played = played;
        let step = server.frame(&mut played, &who, |_| Ok(()));
        assert!(step.is_err(), "{step:?}");
    }
}

#[test]
fn a_connection_of_another_version_is_refused_by_name() {
    let (_, _, mut join) = joining(0);
    join[5] += 1;
    let step = server(SHARED, auto()).frame(&mut join, &identity("float32"), |_| Ok(()));
    let Ok(Step::Refuse(_, Error::Incompatible { field, .. })) = step else {
        panic!("{step:?}")
    };
    assert_eq!(field, "protocol version");
}

#[test]
fn neither_the_secret_of_further_connections_nor_their_keys_show_anything() {
    let ([secret, _], client, _) = joining(0);
    assert_eq!(format!("{secret:?}"), "JoinSecret");
    let shown = format!("{client:?}");
    assert!(shown.len() < 2000 && !shown.contains("key: ["), "{shown}");
}
