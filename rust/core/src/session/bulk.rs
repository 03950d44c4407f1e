//! Further connections of a session. They carry parts of streams, which then leave the session's own connection to messages:
//! some networks give one connection only a part of what they have.
//!
//! The side that dialled the session dials them too, when a stream is long enough, at the address that the session has
//! reached. Each proves a secret of the session, has keys of its own, and joins the session. Where one is lost, its parts may
//! be lost: both sides close it, and destinations ask for their streams again.

use std::collections::BTreeMap;
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
/// Most connections for the streams of a session.
const STREAMS_CAP: usize = 16;
/// Their number between hosts without a setting. Clouds give one connection 5 to 10 Gbit/s.
const BETWEEN_HOSTS: usize = 4;
/// Bytes of a stream for which connections are dialled.
const LEAST_BYTES: u64 = 1 << 20;
/// After a connection could not be made, or was lost, none is dialled for this time.
const REDIAL_PAUSE: Duration = Duration::from_secs(10);

/// How many connections carry the streams of a session. The side that dials decides.
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

/// A further connection that is being made.
#[derive(Debug)]
struct Joining {
    number: u32,
    deadline: Instant,
    /// Once TCP is connected.
    dialled: Option<(Handshake, Link)>,
}

/// A further connection.
#[derive(Debug)]
struct Joined {
    number: u32,
    link: Link,
}

/// The further connections of a session.
#[derive(Debug, Default)]
pub(super) struct Bulk {
    /// What they prove; none before the session's handshake is over.
    pub(super) secret: Option<JoinSecret>,
    /// How many this side dials.
    num_wanted: usize,
    joining: BTreeMap<Token, Joining>,
    joined: BTreeMap<Token, Joined>,
    next_number: u32,
    /// When the next ones may be dialled.
    redial_at: Option<Instant>,
}

impl Bulk {
    /// Those that have joined.
    pub(super) fn links(&mut self) -> impl Iterator<Item = &mut Link> {
        self.joined.values_mut().map(|joined| &mut joined.link)
    }

    /// The one with the fewest bytes that its socket has not taken.
    pub(super) fn least_unsent(&mut self) -> Option<&mut Link> {
        self.links().min_by_key(|link| link.connection.num_unsent())
    }

    /// When the first one that is being made is late.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.joining.values().map(|joining| joining.deadline).min()
    }

    /// One that is being made and is late.
    pub(super) fn first_late(&self, now: Instant) -> Option<Token> {
        let mut joining = self.joining.iter();
        let late = joining.find(|(_, joining)| joining.deadline <= now);
        late.map(|(token, _)| *token)
    }

    /// This side dials them.
    pub(super) fn want(&mut self, streams: Streams, is_on_host: bool) {
        self.num_wanted = streams.num_further(is_on_host);
    }

    /// How many are to be dialled now that a stream of so many bytes begins.
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

    /// How many have joined.
    pub(super) fn num_joined(&self) -> usize {
        self.joined.len()
    }

    /// Those of both kinds.
    pub(super) fn tokens(&self) -> impl Iterator<Item = Token> {
        self.joining.keys().chain(self.joined.keys()).copied()
    }

    /// The one of this number that has joined.
    pub(super) fn of_number(&self, number: u32) -> Option<Token> {
        let mut joined = self.joined.iter();
        let found = joined.find(|(_, joined)| joined.number == number);
        found.map(|(token, _)| *token)
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
            dialled: None,
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
        joining.dialled = Some((handshake, link));
        Ok(())
    }

    /// One has joined that the peer has dialled.
    pub(super) fn add(&mut self, token: Token, number: u32, link: Link) {
        self.joined.insert(token, Joined { number, link });
    }

    /// Forgets one; its number if it had joined.
    pub(super) fn remove(&mut self, token: Token, now: Instant) -> Option<u32> {
        self.redial_at = Some(now + REDIAL_PAUSE);
        self.joining.remove(&token);
        self.joined.remove(&token).map(|joined| joined.number)
    }
}

/// What has come on a further connection.
#[derive(Debug, Default)]
pub(super) struct Received {
    pub(super) parts: Vec<ReceivedPart>,
    pub(super) num_bytes: usize,
    /// Why nothing more comes.
    pub(super) end: Option<BulkEnd>,
}

/// How a further connection has ended.
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
        let dialled = joining.and_then(|joining| joining.dialled.as_mut());
        let joined = self.joined.get_mut(&token).map(|joined| &mut joined.link);
        dialled.map(|(_, link)| link).or(joined)
    }

    /// Sends what waits on a connection, and reads what has come.
    pub(super) fn receive(
        &mut self,
        token: Token,
        sinks: (SessionKey, &StreamSinks),
        ours: &Identity,
    ) -> Received {
        let mut received = Received::default();
        if let Some(link) = self.link(token) {
            link.flush();
        }
        loop {
            if let Err(end) = self.handle_received(token, sinks, ours, &mut received.parts) {
                received.end = Some(end);
                return received;
            }
            let Some(link) = self.link(token) else {
                return received;
            };
            if received.num_bytes >= READ_CAP {
                return received;
            }
            match link.inbox.read(link.connection.socket()) {
                Ok(0) => received.end = Some(BulkEnd::Lost("connection closed".to_owned())),
                Ok(len) => {
                    received.num_bytes += len;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => received.end = Some(BulkEnd::Lost(error.to_string())),
            }
            return received;
        }
    }

    fn handle_received(
        &mut self,
        token: Token,
        (key, sinks): (SessionKey, &StreamSinks),
        ours: &Identity,
        parts: &mut Vec<ReceivedPart>,
    ) -> std::result::Result<(), BulkEnd> {
        self.finish_joining(token, ours)?;
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
            let Some(frame) = link.inbox.next_frame(FRAME_CAP)? else {
                return Ok(());
            };
            let frame = match &mut link.records {
                Some(records) => records.opener.open(frame)?,
                None => frame,
            };
            let SessionFrame::Stream {
                header,
                payload,
                is_aborted,
            } = SessionFrame::decode(frame)?
            else {
                let text = "a frame that is no part of a stream, on a connection for streams";
                return Err(Error::protocol(text).into());
            };
            place(sinks, key, header, payload)?;
            parts.push(ReceivedPart {
                header: header.to_vec(),
                num_bytes: payload.len(),
                is_aborted,
            });
        }
    }

    /// Goes on with the handshake of a connection that this side has dialled.
    fn finish_joining(
        &mut self,
        token: Token,
        ours: &Identity,
    ) -> std::result::Result<(), BulkEnd> {
        let Some(joining) = self.joining.get_mut(&token) else {
            return Ok(());
        };
        let Some((handshake, link)) = &mut joining.dialled else {
            return Ok(());
        };
        let lost = |error: Error| BulkEnd::Lost(error.to_string());
        let Some(frame) = link.inbox.next_frame(HANDSHAKE_FRAME_CAP).map_err(lost)? else {
            return Ok(());
        };
        let step = handshake.frame(frame, ours, |_| Ok(())).map_err(lost)?;
        let Step::Joined(Some(ready)) = step else {
            return Err(BulkEnd::Lost("it was refused".to_owned()));
        };
        link.send(&ready).map_err(BulkEnd::Lost)?;
        if let Some(Joining {
            number,
            dialled: Some((handshake, mut link)),
            ..
        }) = self.joining.remove(&token)
        {
            link.records = handshake.into_records();
            self.joined.insert(token, Joined { number, link });
        }
        Ok(())
    }
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
