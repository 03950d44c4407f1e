//! A lookup buffer whose entries are at servers, as callers see it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::client::LookupClient;
use super::command_queue::{CommandQueue, LookupCommand, QueuedInsert};
use super::messages::TOKENS_CAP;
use super::operation::{Operation, Origin, Selected};
use super::{Items, LookupInfo, LookupQuery, check_entry};
use crate::error::{Error, Result};
use crate::net::identity::{Identity, SessionKind};
use crate::reactor::Route;
use crate::reactor::{Reactor, default_busy_poll};
use crate::session::ReactorConfig;
use crate::session::SessionTimeouts;
use crate::transport::Transport;
use crate::work::{Then, Work};

/// A client of one or more servers: inserts go to the first, selects to all. Any thread may call.
#[derive(Debug)]
pub struct RemoteBuffer {
    reactor: Reactor<std::convert::Infallible>,
    command_queue: Arc<CommandQueue>,
    addresses: Vec<String>,
}

fn check_num_tokens(tokens: &[i64]) -> Result<()> {
    if tokens.len() > TOKENS_CAP {
        return Err(Error::Config(format!(
            "{} tokens; at most {TOKENS_CAP} can be sent",
            tokens.len()
        )));
    }
    Ok(())
}

impl RemoteBuffer {
    /// Resolves the route to all servers, for [`connect_along`](Self::connect_along).
    pub fn route(addresses: Vec<String>, timeout: Duration) -> Result<Route> {
        if addresses.is_empty() {
            return Err(Error::Config("no address to connect to".to_owned()));
        }
        Route::to(addresses, timeout)
    }

    /// As [`connect_along`](Self::connect_along), for callers that need not handle signals while names are resolved.
    pub fn connect(
        addresses: Vec<String>,
        token: &[u8],
        transport: Transport,
        is_checksummed: bool,
        timeout: Duration,
    ) -> Result<(Self, Work<()>)> {
        let route = Self::route(addresses, timeout)?;
        while !route.wait()? {}
        Self::connect_along(&route, token, transport, is_checksummed)
    }

    /// Connects to all servers; the work is done once all have accepted. With `is_checksummed`, they verify checksums of
    /// inserted entries.
    pub fn connect_along(
        route: &Route,
        token: &[u8],
        transport: Transport,
        is_checksummed: bool,
    ) -> Result<(Self, Work<()>)> {
        let config = ReactorConfig {
            listen: None,
            token: token.to_vec(),
            identity: Identity::new(SessionKind::Lookup, "", Vec::new())?,
            transport: Some(transport),
            local: route.local()?,
            timeouts: SessionTimeouts::along(route),
            busy_poll: default_busy_poll(),
        };
        let command_queue = Arc::new(CommandQueue::new());
        command_queue.update_info(|info| info.state = "connecting");
        let in_thread = Arc::clone(&command_queue);
        let reactor =
            crate::session::spawn(config, move || LookupClient::new(in_thread, is_checksummed))?;
        command_queue.set_waker(reactor.waker());
        let (connected, completer) = reactor.work();
        let remote = Self {
            reactor,
            command_queue,
            addresses: route.addresses().to_vec(),
        };
        let connect = LookupCommand::Connect {
            addresses: remote.addresses.clone(),
            completer,
        };
        remote.command_queue.send(connect, Then::GoOn)?;
        Ok((remote, connected))
    }

    fn origin(&self) -> Origin {
        Origin::Remote(Arc::clone(&self.command_queue))
    }

    /// Inserts the tensors at the first server. They must not change before the operation ends.
    ///
    /// # Errors
    /// `Config`: no tokens. The operation ends with `Config` if the entry is larger than the capacity, with `Exhausted` at
    /// `timeout`.
    pub fn insert(
        &self,
        tokens: Vec<i64>,
        items: Items,
        timeout: Option<Duration>,
        then: Then,
    ) -> Result<Operation<()>> {
        check_entry(&tokens)?;
        check_num_tokens(&tokens)?;
        let (inserted, completer) = self.reactor.work();
        let operation = self.command_queue.next_operation();
        let insert = QueuedInsert {
            operation,
            tokens,
            items,
            deadline: timeout.map(|timeout| Instant::now() + timeout),
            completer,
        };
        self.command_queue
            .send(LookupCommand::Insert(insert), then)?;
        Ok(Operation::new(inserted, operation, self.origin()))
    }

    /// Selects an entry of any server; the operation ends with `None` at `timeout`.
    pub fn select(
        &self,
        query: LookupQuery,
        timeout: Option<Duration>,
        then: Then,
    ) -> Result<Operation<Selected>> {
        query.check()?;
        if let LookupQuery::Tokens(tokens) = &query {
            check_num_tokens(tokens)?;
        }
        let (selected, completer) = self.reactor.work();
        let operation = self.command_queue.next_operation();
        let select = LookupCommand::Select {
            operation,
            query,
            timeout,
            completer,
        };
        self.command_queue.send(select, then)?;
        Ok(Operation::new(selected, operation, self.origin()).withdraws_on_drop())
    }

    /// The servers' addresses.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Counters and state.
    pub fn info(&self) -> LookupInfo {
        self.command_queue.info()
    }

    /// Closes the sessions; operations that wait end as closed.
    pub fn close(&self) {
        self.command_queue.close();
        self.reactor.stop();
    }
}

#[cfg(any(test, feature = "fuzzing"))]
impl RemoteBuffer {
    /// Runs one round of a reactor without a thread.
    pub fn manual_round(&self) -> crate::reactor::manual::Round {
        self.reactor.round()
    }
}
