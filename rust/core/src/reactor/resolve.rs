//! From which local address peers are reached. Resolving their names may block, so that each has a thread of its own.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use crate::clock;
use crate::error::{Error, Result};
use crate::process::Thread;
use crate::work::{Waited, Work, work};

/// The local address from which one or more peers are reached; a reactor needs it before it starts. One timeout bounds
/// resolving the names and connecting.
#[derive(Debug)]
pub struct Route {
    addresses: Vec<String>,
    locals: Vec<Work<IpAddr>>,
    pub(crate) begun: Instant,
    /// How long it and the sessions along it may take since it began.
    pub(crate) timeout: Duration,
}

impl Route {
    /// Begins to resolve all of them.
    pub fn to(addresses: Vec<String>, timeout: Duration) -> Result<Self> {
        Self::with(addresses, timeout, |name| {
            name.to_socket_addrs().map(Iterator::collect)
        })
    }

    fn with(addresses: Vec<String>, timeout: Duration, look_up: impl LookUp) -> Result<Self> {
        let begun = clock::now();
        let locals = addresses.iter().map(|peer| ask(peer, look_up.clone()));
        Ok(Self {
            locals: locals.collect::<Result<_>>()?,
            addresses,
            begun,
            timeout,
        })
    }

    /// Waits until all are resolved; false when a signal may have come meanwhile.
    ///
    /// # Errors
    /// `Connect`: a name was not resolved in time.
    pub fn wait(&self) -> Result<bool> {
        for (name, local) in self.addresses.iter().zip(&self.locals) {
            match local.wait(Some(self.begun + self.timeout))? {
                // An unreachable peer is reported without waiting for the others.
                Waited::Done if matches!(local.result(), Some(Err(_))) => break,
                Waited::Done => {}
                Waited::Interrupted => return Ok(false),
                Waited::TimedOut => return Err(self.unresolved(name)),
            }
        }
        Ok(true)
    }

    fn unresolved(&self, name: &str) -> Error {
        Error::Connect(format!(
            "{name:?} was not resolved within {:?}; is the name server reachable?",
            self.timeout
        ))
    }

    /// The peers.
    pub(crate) fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// The address from which all of them are reached; that of every interface, if there is none.
    pub(crate) fn local(&self) -> Result<IpAddr> {
        let mut locals = Vec::new();
        for (name, local) in self.addresses.iter().zip(&self.locals) {
            locals.push(local.result().ok_or_else(|| self.unresolved(name))??);
        }
        locals.dedup();
        Ok(match locals[..] {
            [one] => one,
            _ => Ipv4Addr::UNSPECIFIED.into(),
        })
    }
}

/// Finds the addresses of a name.
trait LookUp: Fn(&str) -> std::io::Result<Vec<SocketAddr>> + Clone + Send + 'static {}

impl<F: Fn(&str) -> std::io::Result<Vec<SocketAddr>> + Clone + Send + 'static> LookUp for F {}

/// The local address from which `peer` is reached. A resolver can hang: it has a thread of its own, which ends when it answers.
fn ask(peer: &str, look_up: impl LookUp) -> Result<Work<IpAddr>> {
    let (local, completer) = work();
    if let Ok(address) = peer.parse() {
        completer.complete(local_towards(peer, address));
        return Ok(local);
    }
    let name = peer.to_owned();
    let resolving = move || completer.complete(resolve(&name, look_up));
    Thread::spawn("kvpipe-resolve", resolving)?;
    Ok(local)
}

fn resolve(name: &str, look_up: impl LookUp) -> Result<IpAddr> {
    let unreachable = |why: &dyn Display| Error::Connect(format!("cannot reach {name}: {why}"));
    let resolved = look_up(name).map_err(|error| unreachable(&error))?;
    // The first with a route: connecting tries them in the same order.
    let mut locals = resolved.into_iter().map(|at| local_towards(name, at));
    let first = locals
        .next()
        .ok_or_else(|| unreachable(&"the name has no address"))?;
    first.or_else(|error| locals.find_map(Result::ok).ok_or(error))
}

fn local_towards(peer: &str, resolved: SocketAddr) -> Result<IpAddr> {
    if resolved.ip().is_loopback() {
        return Ok(resolved.ip());
    }
    let any = match resolved.ip() {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Nothing is sent: connecting a datagram socket only looks the route up.
    let route = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect(resolved)?;
        socket.local_addr()
    });
    // Without a route, UCX must not listen on every interface instead.
    let route = route.map_err(|error| Error::Connect(format!("cannot reach {peer}: {error}")))?;
    Ok(route.ip())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier, mpsc};

    use super::*;
    use crate::lookup::LookupBuffer;
    use crate::pipe::Pipe;
    use crate::transport::{MemoryPath, Transport};

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn to(peers: &[&str]) -> Vec<String> {
        peers.iter().map(ToString::to_string).collect()
    }

    fn local(peer: &str) -> Result<IpAddr> {
        let route = Route::to(to(&[peer]), TIMEOUT)?;
        assert!(route.wait()?, "nothing is resolved");
        route.local()
    }

    /// Every address of this machine is reached from itself; were it every interface, UCX would listen on all.
    #[test]
    fn a_peer_is_reached_from_one_interface() {
        for interface in if_addrs::get_if_addrs().unwrap() {
            let is_link_local =
                matches!(interface.ip(), IpAddr::V6(ip) if ip.is_unicast_link_local());
            if !is_link_local {
                let peer = SocketAddr::new(interface.ip(), 9).to_string();
                assert_eq!(local(&peer).unwrap(), interface.ip(), "{}", interface.name);
            }
        }
    }

    /// No such address is on any network.
    #[test]
    fn without_a_route_no_other_interface_is_used() {
        let error = local("[100::1]:9");
        assert!(!error.is_ok_and(|local| local.is_unspecified()));
    }

    #[test]
    fn a_name_whose_first_address_has_no_route_is_reached_by_the_next() {
        let nowhere = SocketAddr::from((Ipv4Addr::BROADCAST, 9));
        let error = local_towards("nowhere:9", nowhere).unwrap_err();
        for (addresses, expected) in [
            (
                vec![nowhere, SocketAddr::from((Ipv4Addr::LOCALHOST, 9))],
                Ok(Ipv4Addr::LOCALHOST.into()),
            ),
            (vec![nowhere, nowhere], Err(error)),
        ] {
            assert_eq!(
                resolve("nowhere:9", move |_: &str| Ok(addresses.clone())),
                expected
            );
        }
    }

    /// A resolver that never answers; dropping the sender ends its threads.
    fn hanging() -> (impl LookUp, mpsc::Sender<()>) {
        let (lets_end, may_end) = mpsc::channel::<()>();
        let may_end = Arc::new(std::sync::Mutex::new(may_end));
        let look_up = move |_: &str| {
            let _ = may_end.lock().unwrap().recv();
            Ok(Vec::new())
        };
        (look_up, lets_end)
    }

    #[test]
    fn no_name_waits_for_another_to_be_resolved() {
        let all = Arc::new(Barrier::new(3));
        let look_up = move |_: &str| {
            all.wait();
            Ok(vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 9))])
        };
        let route = Route::with(to(&["a:9", "b:9", "c:9"]), TIMEOUT, look_up).unwrap();
        while !route.wait().unwrap() {}
        assert_eq!(route.local().unwrap(), Ipv4Addr::LOCALHOST);
    }

    #[test]
    fn a_caller_that_waits_for_a_name_checks_for_signals() {
        let (look_up, _lets_end) = hanging();
        let route = Route::with(to(&["a:9"]), TIMEOUT, look_up).unwrap();
        assert!(!route.wait().unwrap());
    }

    /// The route to a silent listener, after resolving has used all but a second of the timeout.
    fn nearly_late() -> (Route, std::net::TcpListener) {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let mut route = Route::to(to(&[&address]), 2 * TIMEOUT).unwrap();
        route.begun -= TIMEOUT + TIMEOUT * 19 / 20;
        (route, silent)
    }

    fn assert_late(connected: &Work<()>) {
        let error = connected.wait_for(TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("within 40s"), "{error}");
    }

    #[test]
    fn a_pipe_connects_in_what_resolving_has_left_of_the_timeout() {
        let (route, _silent) = nearly_late();
        let transport = Transport::Memory(MemoryPath::RemoteRead);
        let connected = Pipe::connect_along(
            &route,
            b"",
            transport,
            crate::Integrity::Auto,
            Duration::ZERO,
        );
        let (_pipe, connected) = connected.unwrap();
        assert_late(&connected);
    }

    #[test]
    fn a_lookup_buffer_connects_in_what_resolving_has_left_of_the_timeout() {
        let (route, _silent) = nearly_late();
        let transport = Transport::Memory(MemoryPath::RemoteRead);
        let (_buffer, connected) =
            LookupBuffer::connect_along(&route, b"", transport, true).unwrap();
        assert_late(&connected);
    }

    #[test]
    fn an_unknown_name_is_reported_while_another_is_being_resolved() {
        let (hangs, _lets_end) = hanging();
        let look_up = move |name: &str| match name {
            "typo:9" => Ok(Vec::new()),
            name => hangs(name),
        };
        let route = Route::with(to(&["typo:9", "a:9"]), TIMEOUT, look_up).unwrap();
        while !route.wait().unwrap() {}
        assert!(route.local().unwrap_err().to_string().contains("typo:9"));
    }

    #[test]
    fn names_that_are_not_resolved_in_time_are_reported() {
        let (look_up, _lets_end) = hanging();
        let timeout = Duration::from_millis(20);
        let route = Route::with(to(&["a:9", "b:9"]), timeout, look_up).unwrap();
        let error = route.wait().unwrap_err();
        let text = "\"a:9\" was not resolved within 20ms; is the name server reachable?";
        assert_eq!(error, Error::Connect(text.to_owned()));
    }
}
