//! Checks of producers on behalf of a proxy: whether this engine, as their consumer, can connect to them. Connecting
//! compares tokens and fingerprints.

use std::collections::HashMap;
use std::net::IpAddr;

use super::ControlReply;
use super::messages::ControlMessage;
use super::service::ControlOutbox;
use crate::error::Error;
use crate::ids::SessionKey;
use crate::net::address::check_address;

/// Checks that may wait for a connection: bounds what peers make this engine remember.
const CHECKS_CAP: usize = 1024;
/// Longest address of a producer: a DNS name in brackets and a port.
const ADDRESS_CAP: usize = 253 + 8;

/// Hosts that a check may name. Empty: any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedHosts {
    /// Names, in lower case. They are compared as they are written, and not resolved.
    pub names: Vec<String>,
    /// Networks: an address, and the length of the prefix.
    pub networks: Vec<(IpAddr, u8)>,
}

impl AllowedHosts {
    fn contain(&self, host: &str) -> bool {
        if self.names.is_empty() && self.networks.is_empty() {
            return true;
        }
        match host.parse() {
            Ok(address) => self
                .networks
                .iter()
                .any(|(network, prefix)| is_in(address, *network, *prefix)),
            Err(_) => self.names.contains(&host.to_lowercase()),
        }
    }
}

fn is_in(address: IpAddr, network: IpAddr, prefix: u8) -> bool {
    let (difference, width) = match (address, network) {
        (IpAddr::V4(ours), IpAddr::V4(theirs)) => {
            (u128::from(ours.to_bits() ^ theirs.to_bits()), 32)
        }
        (IpAddr::V6(ours), IpAddr::V6(theirs)) => (ours.to_bits() ^ theirs.to_bits(), 128),
        _ => return false,
    };
    let host_bits = u32::saturating_sub(width, u32::from(prefix));
    difference.checked_shr(host_bits).unwrap_or(0) == 0
}

/// A peer that wants to know whether this engine can connect to a producer.
#[derive(Debug)]
pub(super) struct Check {
    pub(super) session: SessionKey,
    pub(super) id: u64,
    pub(super) producer: String,
}

impl Check {
    fn send_reply(&self, out: &mut ControlOutbox, reason: &str) {
        let (id, reply) = (self.id, ControlReply::Checked(reason.to_owned()));
        out.send(self.session, ControlMessage::Reply { id, reply });
    }
}

/// Without allowed hosts it refuses all.
#[derive(Default)]
pub(super) struct Checks {
    allowed: Option<AllowedHosts>,
    /// By the session to the producer.
    waiting: HashMap<SessionKey, Vec<Check>>,
    num_waiting: usize,
    /// The reason for which each producer was unusable at its last check. The log gets changes only.
    reasons: HashMap<String, String>,
}

impl Checks {
    pub(super) fn allow(&mut self, hosts: AllowedHosts) {
        self.allowed = Some(hosts);
    }

    /// Returns a check for which to connect, or replies why there is none.
    pub(super) fn admit(&self, out: &mut ControlOutbox, check: Check) -> Option<Check> {
        let refusal = self.refusal(&check.producer);
        if refusal.is_empty() {
            return Some(check);
        }
        check.send_reply(out, &refusal);
        None
    }

    fn refusal(&self, producer: &str) -> String {
        let Some(allowed) = &self.allowed else {
            return "this engine consumes no handoffs".to_owned();
        };
        let host = producer.rsplit_once(':').map_or("", |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if check_address(producer).is_err() || producer.len() > ADDRESS_CAP {
            "expected HOST:PORT of a producer".to_owned()
        } else if !allowed.contain(host) {
            format!("{host:?} is not among allowed_producers")
        } else if self.num_waiting >= CHECKS_CAP {
            format!("{CHECKS_CAP} checks wait already; ask again")
        } else {
            String::new()
        }
    }

    /// Replies at once over a session that is established, else when it is or has failed.
    pub(super) fn add(
        &mut self,
        out: &mut ControlOutbox,
        to_producer: SessionKey,
        check: Check,
        is_up: bool,
    ) {
        if is_up {
            return check.send_reply(out, "");
        }
        self.num_waiting += 1;
        self.waiting.entry(to_producer).or_default().push(check);
    }

    pub(super) fn session_up(&mut self, out: &mut ControlOutbox, session: SessionKey) {
        for check in self.remove(session) {
            check.send_reply(out, "");
            if self.reasons.remove(&check.producer).is_some() {
                let producer = check.producer;
                tracing::info!("pair.usable producer={producer:?}");
            }
        }
    }

    /// Replies to the checks of a session that has failed, and forgets those of a peer that has left. Returns whether the
    /// failure was logged, now or at an earlier check.
    pub(super) fn session_down(
        &mut self,
        out: &mut ControlOutbox,
        session: SessionKey,
        error: &Error,
    ) -> bool {
        let failed = self.remove(session);
        let reason = error.to_string();
        for check in &failed {
            check.send_reply(out, &reason);
            self.log_once(&check.producer, &reason);
        }
        for checks in self.waiting.values_mut() {
            let before = checks.len();
            checks.retain(|check| check.session != session);
            self.num_waiting -= before - checks.len();
        }
        self.waiting.retain(|_, checks| !checks.is_empty());
        !failed.is_empty()
    }

    fn log_once(&mut self, producer: &str, reason: &str) {
        if self
            .reasons
            .get(producer)
            .is_some_and(|last| last == reason)
        {
            return;
        }
        tracing::warn!("pair.unusable producer={producer:?} reason={reason:?}");
        if self.reasons.len() >= CHECKS_CAP {
            self.reasons.clear();
        }
        self.reasons.insert(producer.to_owned(), reason.to_owned());
    }

    fn remove(&mut self, session: SessionKey) -> Vec<Check> {
        let checks = self.waiting.remove(&session).unwrap_or_default();
        self.num_waiting -= checks.len();
        checks
    }

    /// Sizes of its maps.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("checks", self.num_waiting),
            ("producers that are checked", self.waiting.len()),
            ("reasons of checks", self.reasons.len()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logged::logged;

    const PRODUCER: &str = "10.0.0.7:7001";

    fn check(id: u64, producer: &str) -> Check {
        Check {
            session: 20,
            id,
            producer: producer.to_owned(),
        }
    }

    fn checks(names: &[&str], networks: &[(&str, u8)]) -> Checks {
        let networks = networks.iter();
        let hosts = AllowedHosts {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            networks: networks.map(|(ip, n)| (ip.parse().unwrap(), *n)).collect(),
        };
        let mut checks = Checks::default();
        checks.allow(hosts);
        checks
    }

    fn reply(id: u64, reason: &str) -> (SessionKey, ControlMessage) {
        let reply = ControlReply::Checked(reason.to_owned());
        (20, ControlMessage::Reply { id, reply })
    }

    #[test]
    fn an_engine_that_consumes_nothing_connects_nowhere() {
        let mut out = ControlOutbox::default();
        let admitted = Checks::default().admit(&mut out, check(1, PRODUCER));
        assert!(admitted.is_none());
        assert_eq!(out.messages, [reply(1, "this engine consumes no handoffs")]);
    }

    #[test]
    fn a_check_names_an_allowed_host() {
        let any = checks(&[], &[]);
        let some = checks(&["prefill-0"], &[("10.0.0.0", 16), ("fd00::", 8)]);
        for (producer, is_in_any, is_in_some) in [
            (PRODUCER, true, true),
            ("10.1.0.7:7001", true, false),
            ("[fd00::7]:7001", true, true),
            ("[fe80::7]:7001", true, false),
            ("Prefill-0:7001", true, true),
            ("prefill-1:7001", true, false),
            ("no port", false, false),
            (":7001", false, false),
        ] {
            assert_eq!(any.refusal(producer).is_empty(), is_in_any, "{producer}");
            assert_eq!(some.refusal(producer).is_empty(), is_in_some, "{producer}");
        }
        assert!(
            !any.refusal(&format!("{}:1", "a".repeat(ADDRESS_CAP)))
                .is_empty()
        );
    }

    #[test]
    fn every_prefix_is_that_of_pythons_ip_network() {
        let is_in = |prefix| is_in([10, 0, 0, 1].into(), [10, 0, 0, 0].into(), prefix);
        assert_eq!([0, 8, 31, 32].map(is_in), [true, true, true, false]);
        assert!(is_in(200) == is_in(32), "no prefix can panic");
    }

    #[test]
    fn all_that_wait_for_one_producer_are_told_and_the_reason_is_logged_once() {
        let (mut checks, mut out) = (checks(&[], &[]), ControlOutbox::default());
        let error = Error::Authentication("10.0.0.7:7001 has another token".to_owned());
        let lines = logged(|| {
            for round in 0..3 {
                checks.add(&mut out, 30, check(2 * round, PRODUCER), false);
                checks.add(&mut out, 30, check(2 * round + 1, PRODUCER), false);
                assert!(checks.session_down(&mut out, 30, &error));
            }
        });
        let reason = error.to_string();
        let replies: Vec<_> = (0..6).map(|id| reply(id, &reason)).collect();
        assert_eq!(out.messages, replies);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains(&reason), "{lines:?}");
        assert_eq!(checks.num_waiting, 0);
    }

    #[test]
    fn a_reason_is_logged_again_after_the_producer_was_of_use() {
        let (mut checks, mut out) = (checks(&[], &[]), ControlOutbox::default());
        let lost = Error::lost(PRODUCER, "connection closed");
        let lines = logged(|| {
            for id in [0, 2] {
                checks.add(&mut out, 30, check(id, PRODUCER), false);
                checks.session_down(&mut out, 30, &lost);
                checks.add(&mut out, 31, check(id + 1, PRODUCER), false);
                checks.session_up(&mut out, 31);
            }
        });
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert_eq!(out.messages[1], reply(1, ""));
    }

    #[test]
    fn a_session_that_is_up_answers_at_once() {
        let (mut checks, mut out) = (checks(&[], &[]), ControlOutbox::default());
        checks.add(&mut out, 30, check(0, PRODUCER), true);
        assert_eq!(out.messages, [reply(0, "")]);
    }

    #[test]
    fn a_peer_that_has_left_is_forgotten() {
        let (mut checks, mut out) = (checks(&[], &[]), ControlOutbox::default());
        checks.add(&mut out, 30, check(0, PRODUCER), false);
        let lost = Error::lost("proxy", "connection closed");
        assert!(!checks.session_down(&mut out, 20, &lost));
        assert!(checks.sizes().iter().all(|(_, size)| *size == 0));
        checks.session_up(&mut out, 30);
        assert_eq!(out.messages, []);
    }

    #[test]
    fn no_peer_makes_more_checks_wait_than_there_is_room_for() {
        let (mut checks, mut out) = (checks(&[], &[]), ControlOutbox::default());
        for id in 0..CHECKS_CAP as u64 {
            checks.add(&mut out, 30 + id, check(id, PRODUCER), false);
        }
        assert!(checks.admit(&mut out, check(7, PRODUCER)).is_none());
        assert_eq!(
            out.messages,
            [reply(7, "1024 checks wait already; ask again")]
        );
    }
}
