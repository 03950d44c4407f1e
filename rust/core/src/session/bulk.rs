//! Further connections of a session. They carry parts of streams, which then leave the session's own connection to messages:
//! some networks give one connection only a part of what they have.
//!
//! The side that dialled the session dials them too, when a stream is long enough, at the address that the session has
//! reached. Each proves a secret of the session, has keys of its own, and joins the session. Where one is lost, its parts may
//! be lost: both sides close it, and destinations ask for their streams again.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::inbox::{READ_CAP, ReceivedPart, place};
use super::link::Link;
use super::stream_sinks::StreamSinks;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::framing::{FRAME_CAP, SessionFrame};
use crate::net::handshake::{HANDSHAKE_FRAME_CAP, Handshake, Step};
use crate::net::identity::Identity;
use crate::net::secret::{JoinSecret, SessionId};
use crate::reactor::Token;

/// The setting of users.
const VARIABLE: &str = "KVPIPE_STREAMS";
/// Most numbers of ended connections that are remembered.
const ENDED_CAP: usize = 64;
/// Most connections for the streams of a session.
const STREAMS_CAP: usize = 16;
/// Their number between hosts without a setting. Clouds give one connection 5 to 10 Gbit/s.
const BETWEEN_HOSTS: usize = 4;
/// Bytes of a stream for which connections are dialled.
const LEAST_BYTES: u64 = 1 << 20;
/// After a connection could not be made, or was lost, none is dialled for this time.
const REDIAL_PAUSE: Duration = Duration::from_secs(10);

/// Number of connections that carry the streams of a session. The side that dials decides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Streams {
    /// One on one host, which is the session's own; four between hosts.
    #[default]
    Auto,
    /// So many; one is the session's own.
    Fixed(usize),
}

impl Streams {
    /// The setting of this process.
    ///
    /// # Errors
    /// `Config`: it is none of the values.
    pub(crate) fn of_environment() -> Result<Self> {
        Self::of_setting(std::env::var(VARIABLE).ok().as_deref())
    }

    fn of_setting(setting: Option<&str>) -> Result<Self> {
        let Some(setting) = setting.filter(|it| !matches!(*it, "" | "auto")) else {
            return Ok(Self::Auto);
        };
        let number = setting.parse().ok();
        let number = number.filter(|number| (1..=STREAMS_CAP).contains(number));
        number.map(Self::Fixed).ok_or_else(|| {
            Error::Config(format!(
                "{VARIABLE}={setting}: expected auto (1 on one host, {BETWEEN_HOSTS} between hosts), or 1 to {STREAMS_CAP}"
            ))
        })
    }

    /// The number of further connections of a session.
    fn num_further(self, is_on_host: bool) -> usize {
        match self {
            Self::Auto if is_on_host => 0,
            Self::Auto => BETWEEN_HOSTS,
            Self::Fixed(1) => 0,
            Self::Fixed(number) => number,
        }
    }
}

/// A further connection that this side makes. Nothing is sent on it before the peer's first HEARTBEAT: until then the peer may
/// not know that it has joined, so that the loss of it would not be reported.
#[derive(Debug)]
struct Joining {
    number: u32,
    deadline: Instant,
    /// None once READY has been sent.
    handshake: Option<Handshake>,
    /// None before TCP is connected.
    link: Option<Link>,
}

/// A further connection.
#[derive(Debug)]
struct Joined {
    number: u32,
    link: Link,
    last_rx: Instant,
}

impl Joined {
    fn alive_since(&self) -> Instant {
        self.link.inbox.alive_since(self.last_rx)
    }
}

/// The further connections of a session.
#[derive(Debug, Default)]
pub(super) struct Bulk {
    /// Secret that they prove; none before the session's handshake is over.
    pub(super) secret: Option<JoinSecret>,
    /// Number that this side dials.
    num_wanted: usize,
    joining: BTreeMap<Token, Joining>,
    joined: BTreeMap<Token, Joined>,
    next_number: u32,
    /// The latest numbers of those that this side has ended: the peer may have lost them too.
    ended: BTreeSet<u32>,
    /// Earliest time to dial the next ones.
    redial_at: Option<Instant>,
}

impl Bulk {
    /// Those that have joined.
    pub(super) fn links(&mut self) -> impl Iterator<Item = &mut Link> {
        self.joined.values_mut().map(|joined| &mut joined.link)
    }

    /// The one with the fewest bytes that its socket has not taken.
    pub(super) fn least_unsent(&mut self) -> Option<&mut Link> {
        let usable = self.links().filter(|link| !link.connection.is_broken());
        usable.min_by_key(|link| link.connection.num_unsent())
    }

    /// Sends a heartbeat on each. The peer's liveness is judged by the bytes that it sends.
    pub(super) fn send_heartbeats(&mut self) {
        for link in self.links() {
            send_heartbeat(link);
        }
    }

    /// Earliest time at which a further connection is late: it has not joined, or was silent for so long.
    pub(super) fn next_deadline(&self, silence: Duration) -> Option<Instant> {
        let joining = self.joining.values().map(|joining| joining.deadline);
        let joined = self.joined.values();
        let joined = joined.map(|joined| joined.alive_since() + silence);
        joining.chain(joined).min()
    }

    /// One that is late, and why.
    pub(super) fn first_late(&self, now: Instant, silence: Duration) -> Option<(Token, String)> {
        let mut joining = self.joining.iter();
        let late = joining.find(|(_, joining)| joining.deadline <= now);
        let late = late.map(|(token, _)| (*token, "it did not join in time".to_owned()));
        let mut joined = self.joined.iter();
        let is_silent = |joined: &Joined| joined.alive_since() + silence <= now;
        let silent = joined.find(|(_, joined)| is_silent(joined));
        late.or_else(|| Some((*silent?.0, format!("silent for {silence:?}"))))
    }

    /// This side dials them.
    pub(super) fn want(&mut self, streams: Streams, is_on_host: bool) {
        self.num_wanted = streams.num_further(is_on_host);
    }

    /// Number to dial now that a stream of so many bytes begins.
    pub(super) fn num_missing(&self, num_bytes: u64, now: Instant) -> usize {
        if num_bytes < LEAST_BYTES || self.redial_at.is_some_and(|at| now < at) {
            return 0;
        }
        self.num_wanted.saturating_sub(self.len())
    }

    fn len(&self) -> usize {
        self.joining.len() + self.joined.len()
    }

    /// True if no more may join.
    pub(super) fn is_full(&self) -> bool {
        self.joined.len() >= STREAMS_CAP
    }

    /// Number that have joined.
    pub(super) fn num_joined(&self) -> usize {
        self.joined.len()
    }

    /// Those of both kinds.
    pub(super) fn tokens(&self) -> impl Iterator<Item = Token> {
        self.joining.keys().chain(self.joined.keys()).copied()
    }

    /// The one of this number.
    pub(super) fn of_number(&self, number: u32) -> Option<Token> {
        let joining = self.joining.iter().map(|(token, it)| (token, it.number));
        let joined = self.joined.iter().map(|(token, it)| (token, it.number));
        let mut numbers = joining.chain(joined);
        let found = numbers.find(|(_, other)| *other == number);
        found.map(|(token, _)| *token)
    }

    /// True if this side has ended the one of this number after it had joined.
    pub(super) fn has_ended(&self, number: u32) -> bool {
        self.ended.contains(&number)
    }

    /// The name of the session to join.
    pub(super) fn session_id(&self) -> Option<SessionId> {
        self.secret.as_ref().map(JoinSecret::session_id)
    }

    /// One is being dialled.
    pub(super) fn dial(&mut self, token: Token, deadline: Instant) {
        let joining = Joining {
            number: self.next_number,
            deadline,
            handshake: None,
            link: None,
        };
        self.next_number += 1;
        self.joining.insert(token, joining);
    }

    /// One that was dialled is connected: asks to join.
    ///
    /// # Errors
    /// `Exhausted`: the system gives no random bytes. `Connect`: the connection is broken.
    pub(super) fn ask_to_join(
        &mut self,
        token: Token,
        connection: Connection,
        is_sealed: bool,
        peer: &str,
    ) -> Result<()> {
        let joining = self.joining.get_mut(&token);
        let Some((joining, secret)) = joining.zip(self.secret.as_ref()) else {
            return Ok(());
        };
        let (handshake, join) = Handshake::joining(secret, joining.number, is_sealed, peer)?;
        let mut link = Link::new(connection);
        link.send(&join).map_err(Error::Connect)?;
        (joining.handshake, joining.link) = (Some(handshake), Some(link));
        Ok(())
    }

    /// One has joined that the peer has dialled.
    pub(super) fn add(&mut self, token: Token, number: u32, mut link: Link, now: Instant) {
        send_heartbeat(&mut link);
        self.insert(token, number, link, now);
    }

    fn insert(&mut self, token: Token, number: u32, link: Link, last_rx: Instant) {
        let joined = Joined {
            number,
            link,
            last_rx,
        };
        self.joined.insert(token, joined);
    }

    /// Forgets one; its number if it had joined.
    pub(super) fn remove(&mut self, token: Token, now: Instant) -> Option<u32> {
        self.redial_at = Some(now + REDIAL_PAUSE);
        self.joining.remove(&token);
        let number = self.joined.remove(&token)?.number;
        self.ended.insert(number);
        if self.ended.len() > ENDED_CAP {
            self.ended.pop_first();
        }
        Some(number)
    }
}

fn send_heartbeat(link: &mut Link) {
    // One that is broken is noticed when it is read.
    let _ = link.send(&SessionFrame::Heartbeat.encode());
}

/// Events of a further connection.
#[derive(Debug, Default)]
pub(super) struct BulkEvents {
    pub(super) parts: Vec<ReceivedPart>,
    pub(super) num_bytes: usize,
    /// The end of the connection, if it has ended.
    pub(super) end: Option<BulkEnd>,
}

/// End of a further connection.
#[derive(Debug)]
pub(super) enum BulkEnd {
    /// It is lost; the session goes on.
    Lost(String),
    /// The peer broke the protocol, or a destination cannot be written: the session ends. The text does not name the peer.
    Failed(Error),
}

impl From<Error> for BulkEnd {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Bulk {
    fn link(&mut self, token: Token) -> Option<&mut Link> {
        let joining = self.joining.get_mut(&token);
        let dialled = joining.and_then(|joining| joining.link.as_mut());
        let joined = self.joined.get_mut(&token).map(|joined| &mut joined.link);
        dialled.or(joined)
    }

    /// Sends what waits on a connection, and reads what has come.
    pub(super) fn receive(
        &mut self,
        token: Token,
        sinks: (SessionKey, &StreamSinks),
        ours: &Identity,
        now: Instant,
    ) -> BulkEvents {
        let mut received = BulkEvents::default();
        if let Some(link) = self.link(token) {
            link.flush();
        }
        loop {
            let handled = self
                .finish_joining(token, ours, now)
                .and_then(|()| self.handle_joined(token, sinks, &mut received.parts));
            if let Err(end) = handled {
                received.end = Some(end);
                return received;
            }
            let Some(link) = self.link(token) else {
                return received;
            };
            link.inbox.note_advance(now);
            if received.num_bytes >= READ_CAP {
                return received;
            }
            match link.inbox.read(link.connection.socket()) {
                Ok(0) => received.end = Some(BulkEnd::Lost("connection closed".to_owned())),
                Ok(len) => {
                    received.num_bytes += len;
                    if let Some(joined) = self.joined.get_mut(&token) {
                        joined.last_rx = now;
                    }
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => received.end = Some(BulkEnd::Lost(error.to_string())),
            }
            return received;
        }
    }

    fn handle_joined(
        &mut self,
        token: Token,
        (key, sinks): (SessionKey, &StreamSinks),
        parts: &mut Vec<ReceivedPart>,
    ) -> std::result::Result<(), BulkEnd> {
        let Some(Joined { link, .. }) = self.joined.get_mut(&token) else {
            return Ok(());
        };
        loop {
            if link.records.is_none()
                && let Some(part) = link.inbox.next_part(key, sinks)?
            {
                parts.push(part);
                continue;
            }
            match next_frame(link)? {
                None => return Ok(()),
                Some(SessionFrame::Heartbeat) => {}
                Some(SessionFrame::Stream {
                    header,
                    payload,
                    is_aborted,
                }) => {
                    place(sinks, key, header, payload)?;
                    parts.push(ReceivedPart {
                        header: header.to_vec(),
                        num_bytes: payload.len(),
                        is_aborted,
                    });
                }
                Some(_) => {
                    let text = "a frame that is no part of a stream, on a connection for streams";
                    return Err(Error::protocol(text).into());
                }
            }
        }
    }

    /// Goes on with a connection that this side makes, until the peer's first HEARTBEAT has come.
    fn finish_joining(
        &mut self,
        token: Token,
        ours: &Identity,
        now: Instant,
    ) -> std::result::Result<(), BulkEnd> {
        let Some(joining) = self.joining.get_mut(&token) else {
            return Ok(());
        };
        let Some(link) = &mut joining.link else {
            return Ok(());
        };
        if let Some(mut handshake) = joining.handshake.take() {
            let lost = |error: Error| BulkEnd::Lost(error.to_string());
            let Some(frame) = link.inbox.next_frame(HANDSHAKE_FRAME_CAP).map_err(lost)? else {
                joining.handshake = Some(handshake);
                return Ok(());
            };
            let step = handshake.frame(frame, ours, |_| Ok(())).map_err(lost)?;
            let Step::Joined(Some(ready)) = step else {
                return Err(BulkEnd::Lost("it was refused".to_owned()));
            };
            link.send(&ready).map_err(BulkEnd::Lost)?;
            link.records = handshake.into_records();
        }
        match next_frame(link)? {
            None => return Ok(()),
            Some(SessionFrame::Heartbeat) => {}
            Some(_) => return Err(Error::protocol("a first frame that is no heartbeat").into()),
        }
        if let Some(Joining {
            number,
            link: Some(link),
            ..
        }) = self.joining.remove(&token)
        {
            self.insert(token, number, link, now);
        }
        Ok(())
    }
}

/// The next frame that has come whole.
fn next_frame(link: &mut Link) -> Result<Option<SessionFrame<'_>>> {
    let Link { inbox, records, .. } = link;
    let Some(frame) = inbox.next_frame(FRAME_CAP)? else {
        return Ok(None);
    };
    let frame = match records {
        Some(records) => records.opener.open(frame)?,
        None => frame,
    };
    SessionFrame::decode(frame).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_auto_or_1_to_16_and_any_other_is_refused_by_name() {
        for (setting, expected) in [
            (None, Streams::Auto),
            (Some(""), Streams::Auto),
            (Some("auto"), Streams::Auto),
            (Some("1"), Streams::Fixed(1)),
            (Some("16"), Streams::Fixed(16)),
        ] {
            assert_eq!(Streams::of_setting(setting), Ok(expected));
        }
        for refused in ["0", "17", "-1", "two"] {
            let error = Streams::of_setting(Some(refused)).unwrap_err().to_string();
            let text = format!("KVPIPE_STREAMS={refused}: expected auto");
            assert!(error.contains(&text), "{error}");
        }
    }

    #[test]
    fn streams_have_one_connection_on_one_host_and_four_of_their_own_between_hosts() {
        for (streams, is_on_host, num_further) in [
            (Streams::Auto, true, 0),
            (Streams::Auto, false, 4),
            (Streams::Fixed(1), false, 0),
            (Streams::Fixed(2), true, 2),
        ] {
            assert_eq!(streams.num_further(is_on_host), num_further);
        }
    }

    #[test]
    fn connections_are_dialled_for_long_streams_once_and_again_ten_seconds_after_one_was_lost() {
        let (mut bulk, now) = (Bulk::default(), Instant::now());
        bulk.want(Streams::Fixed(3), true);
        assert_eq!(bulk.num_missing(LEAST_BYTES - 1, now), 0);
        assert_eq!(bulk.num_missing(LEAST_BYTES, now), 3);
        for token in [20, 21, 22] {
            bulk.dial(token, now);
        }
        assert_eq!(bulk.num_missing(LEAST_BYTES, now), 0);
        assert_eq!(bulk.remove(21, now), None, "it had not joined");
        assert_eq!(bulk.num_missing(LEAST_BYTES, now), 0);
        assert_eq!(bulk.num_missing(LEAST_BYTES, now + REDIAL_PAUSE), 1);
    }
}
