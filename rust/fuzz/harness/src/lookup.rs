//! Both sides of a lookup buffer against a peer that holds the token.

use std::sync::Arc;
use std::time::Duration;

use kvpipe_core::entries::lookup::{
    Items, LookupBuffer, LookupQuery, NUM_ITEMS, Operation, Selected,
};
use kvpipe_core::fuzzing::{Round, without_threads};
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::tensor::Received;
use kvpipe_core::work::{Then, Work};
use kvpipe_ucx::Buffer;

use crate::hostile::{Hostile, TOKEN, transport};
use crate::pipe::meta;
use crate::script::{Victim, read, run_session};

const TIMEOUT: Duration = Duration::from_secs(600);
/// Bytes that the buffer holds at most.
const CAPACITY: u64 = 1 << 20;

/// Calls of the buffer's user.
pub(crate) mod user {
    pub(crate) const INSERT: u8 = 0;
    pub(crate) const SELECT: u8 = 1;
    pub(crate) const SELECT_TOKENS: u8 = 2;
    pub(crate) const DROP_SELECT: u8 = 3;
    pub(crate) const CONSUME: u8 = 4;
    pub(crate) const WITHDRAW: u8 = 5;
    pub(crate) const COUNT: u8 = WITHDRAW + 1;
}

struct Side {
    buffer: LookupBuffer,
    inserts: Vec<Operation<()>>,
    selects: Vec<Operation<Selected>>,
    /// Shared by all tensors, and released by all of them at the end.
    owner: Arc<()>,
    connected: Option<Work<()>>,
}

impl Side {
    fn new(buffer: LookupBuffer, connected: Option<Work<()>>) -> Self {
        Self {
            buffer,
            inserts: Vec::new(),
            selects: Vec::new(),
            owner: Arc::new(()),
            connected,
        }
    }

    fn items(&self, argument: u8) -> Items {
        let len = usize::from(argument) << 10;
        let tensor = |index: usize| {
            let owner = Box::new(Arc::clone(&self.owner));
            let buffer = Buffer::zeroed(len).first(len, owner);
            Arc::new(Received {
                meta: meta(len as u64),
                buffer: buffer.filter(|_| index.is_multiple_of(2) && len > 0),
            })
        };
        let tensors: [usize; NUM_ITEMS] = std::array::from_fn(|index| index);
        Items(tensors.map(tensor))
    }
}

impl Victim for Side {
    fn round(&self) -> Round {
        self.buffer.manual_round()
    }

    fn act(&mut self, what: u8, argument: u8) {
        match what % user::COUNT {
            user::INSERT => {
                let items = self.items(argument);
                let insert = self.buffer.insert(vec![1, 2], items, None, Then::GoOn);
                self.inserts.extend(insert);
            }
            user::SELECT => {
                let select = self.buffer.select(LookupQuery::Any, None, Then::GoOn);
                self.selects.extend(select);
            }
            user::SELECT_TOKENS => {
                let tokens = LookupQuery::Tokens(vec![argument.into()]);
                self.selects
                    .extend(self.buffer.select(tokens, None, Then::GoOn));
            }
            user::DROP_SELECT => drop(self.selects.pop()),
            user::CONSUME => {
                let select = self.selects.last();
                if let Some(Ok(Some(delivery))) = select.and_then(Operation::result) {
                    delivery.consume();
                }
            }
            _ => {
                if let Some(insert) = self.inserts.last() {
                    insert.withdraw();
                }
            }
        }
    }

    fn close(&mut self) {
        self.buffer.close();
    }

    /// The operations of a client end with its server. Those on a served buffer may wait for other clients.
    fn check_without_peer(&self) {
        if let Some(connected) = &self.connected {
            assert!(connected.is_completed(), "connecting");
            assert!(self.inserts.iter().all(Operation::is_completed), "insert");
            assert!(self.selects.iter().all(Operation::is_completed), "select");
        }
    }

    fn check(&mut self) {
        assert!(self.connected.as_ref().is_none_or(Work::is_completed));
        assert!(self.inserts.iter().all(Operation::is_completed), "insert");
        assert!(self.selects.iter().all(Operation::is_completed), "select");
        self.inserts.clear();
        self.selects.clear();
        assert_eq!(Arc::strong_count(&self.owner), 1, "a tensor is kept");
    }
}

/// A buffer that is served.
///
/// # Panics
/// The lookup buffer breaks a promise.
pub(crate) fn server(bytes: &[u8]) {
    let (flags, steps) = read(bytes);
    let transport = transport(flags);
    let buffer = LookupBuffer::new(CAPACITY);
    let is_checksummed = !flags.has_no_checksums();
    let serve = || buffer.serve("127.0.0.1:0", TOKEN, transport.clone(), is_checksummed);
    without_threads(serve).expect("served");
    let hostile = Hostile::connect(
        SessionKind::Lookup,
        Some(&transport),
        buffer.address().parse().ok(),
    );
    run_session(Side::new(buffer, None), hostile, flags, steps);
}

/// A client of a buffer.
///
/// # Panics
/// The lookup buffer breaks a promise.
pub(crate) fn client(bytes: &[u8]) {
    let (flags, steps) = read(bytes);
    let transport = transport(flags);
    let (hostile, address) = Hostile::listen(SessionKind::Lookup, Some(&transport));
    let is_checksummed = !flags.has_no_checksums();
    let connect = || {
        let addresses = vec![address];
        LookupBuffer::connect(addresses, TOKEN, transport.clone(), is_checksummed, TIMEOUT)
    };
    let (buffer, connected) = without_threads(connect).expect("buffer");
    run_session(Side::new(buffer, Some(connected)), hostile, flags, steps);
}
