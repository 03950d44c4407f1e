//! A store and a client of it, which stay, and clients that come and leave: values that are put, selected, taken and
//! abandoned, reservations that are never committed, and calls that wait for values that never come.

use std::sync::Arc;
use std::time::Duration;

use kvpipe_ucx::Buffer;

use super::visitors::{SIZES, TIMEOUT};
use super::{MANY_BYTES, Rng, TOKEN, is_busy};
use crate::entries::store::{OpenedValue, StoreClient, StoreServer};
use crate::reactor::manual::{Sizes, without_threads};
use crate::transport::{MemoryPath, Transport};
use crate::work::{Then, Work};

/// A read of a value takes several rounds only as a stream.
const TRANSPORT: Transport = Transport::Memory(MemoryPath::Stream);
const CAPACITY: u64 = 16 << 20;
const RESERVATION: Duration = Duration::from_secs(30);
const KEYS: u64 = 20;

type Reserved = Work<Option<u64>>;
type Opened = (Work<Option<Arc<OpenedValue>>>, u64);

pub(super) struct Stores {
    server: StoreServer,
    client: StoreClient,
    /// Leaves at any time, with what it holds.
    leaving: StoreClient,
    reserved: Vec<Reserved>,
    /// Operations that hold or await a value.
    opened: Vec<Opened>,
}

fn connect(server: &StoreServer) -> StoreClient {
    let connect = || StoreClient::connect(server.address(), TOKEN, TRANSPORT, TIMEOUT);
    let (client, connected) = without_threads(connect).expect("a client");
    drop(connected);
    client
}

fn key(rng: &mut Rng) -> Vec<u8> {
    vec![1 + rng.one_of(KEYS) as u8]
}

impl Stores {
    pub(super) fn new() -> Self {
        let serve = || {
            StoreServer::serve(
                "127.0.0.1:0",
                TOKEN,
                TRANSPORT,
                CAPACITY,
                Some(CAPACITY),
                RESERVATION,
                None,
            )
        };
        let server = without_threads(serve).expect("served");
        Self {
            client: connect(&server),
            leaving: connect(&server),
            server,
            reserved: Vec::new(),
            opened: Vec::new(),
        }
    }

    pub(super) fn round(&self) -> bool {
        let rounds = [
            self.server.manual_round(),
            self.client.manual_round(),
            self.leaving.manual_round(),
        ];
        rounds.map(is_busy).contains(&true)
    }

    pub(super) fn act(&mut self, rng: &mut Rng) {
        let is_leaving = rng.one_of(3) == 0;
        let client = if is_leaving {
            &self.leaving
        } else {
            &self.client
        };
        let (len, timeout) = (SIZES[rng.one_of(2) as usize], Some(TIMEOUT));
        drop(client.put(key(rng), Buffer::zeroed(len), Vec::new(), Some(RESERVATION)));
        drop(client.exists(vec![key(rng)]));
        let reserved = client.reserve(key(rng), CAPACITY / 3, None, timeout);
        let selected = client.select(key(rng), timeout);
        let taken = client.take(key(rng), RESERVATION, timeout);
        if is_leaving && rng.one_of(4) == 0 {
            self.leaving = connect(&self.server);
        } else if !is_leaving {
            self.opened.extend(selected);
            self.opened.extend(taken);
            self.reserved.extend(reserved.map(|(work, _)| work));
        }
        self.go_on(rng);
    }

    /// The client that stays writes into its reservations, or leaves them, and reads and closes what it has open.
    fn go_on(&mut self, rng: &mut Rng) {
        for reserved in self.reserved.extract_if(.., |work| work.is_completed()) {
            if let Some(Ok(Some(reservation))) = reserved.result()
                && rng.one_of(2) == 0
            {
                let buffer = Buffer::zeroed((CAPACITY / 3) as usize);
                drop(self.client.write(reservation, buffer));
                drop(self.client.commit(reservation, b"record".to_vec()));
            }
        }
        for (opened, operation) in self.opened.extract_if(.., |_| rng.one_of(3) == 0) {
            if let Some(Ok(Some(value))) = opened.result() {
                let buffer = Buffer::zeroed(value.num_bytes as usize);
                drop(self.client.read(&value, buffer));
            }
            drop(self.client.acknowledge(operation));
            drop(self.client.release(operation, Then::GoOn));
        }
    }

    /// Values that take several slices.
    pub(super) fn begin_large(&self) {
        for name in [b"large", b"other"] {
            let buffer = Buffer::zeroed(MANY_BYTES);
            drop(self.client.put(name.to_vec(), buffer, Vec::new(), None));
        }
        let selected = self.client.select(b"large".to_vec(), None);
        drop(selected);
    }

    /// Everything is closed and deleted; what others hold ends by time, or with them.
    pub(super) fn end_all(&mut self) {
        self.client = connect(&self.server);
        self.leaving.close();
        self.leaving = connect(&self.server);
        self.opened.clear();
        self.reserved.clear();
        self.leaving.close();
        let keys = (1..=KEYS as u8).map(|key| vec![key]);
        let large = [b"large", b"other"].map(|key| key.to_vec());
        for _ in 0..100 {
            self.round();
        }
        drop(self.client.delete(keys.chain(large).collect()));
    }

    pub(super) fn sizes(&self) -> Vec<(&'static str, Sizes)> {
        vec![
            ("store", self.server.sizes()),
            ("client of the store", self.client.sizes()),
        ]
    }
}
