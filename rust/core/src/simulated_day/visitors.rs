//! Actors that connect and leave: agents, control ports, clients of a lookup buffer, pipes, and strangers. One client of the
//! buffer stays.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use kvpipe_ucx::Buffer;

use super::agents::{Agents, Node};
use super::control::{Ports, port};
use super::{LATE, MANY_BYTES, Rng, TOKEN, is_busy, transport};
use crate::Integrity;
use crate::control::{Control, ControlQuery};
use crate::entries::lookup::{Items, LookupBuffer, LookupQuery, Operation, Selected};
use crate::pipe::{Deadline, Pipe};
use crate::reactor::manual::{Sizes, without_threads};
use crate::tensor::{Meta, Received};
use crate::transport::{MemoryPath, Transport};
use crate::work::{Then, Work};

/// More inserts than the server lets wait.
const BURST: usize = 70;
const TRANSPORT: Transport = Transport::Memory(MemoryPath::RemoteRead);
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a tensor or entry, of which the larger are read by the other side.
pub(super) const SIZES: [usize; 2] = [100, 100 << 10];

#[expect(dead_code, reason = "what a visitor keeps open, or waits for")]
enum Visitor {
    Agent(Node),
    Control(Control),
    Client(LookupBuffer, Vec<Operation<Selected>>),
    Pipe([Pipe; 2], Work<Arc<Received>>),
    /// Connects, and sends nothing or what is no protocol.
    Stranger(TcpStream),
    /// Accepts connections, and nothing more.
    Silent(TcpListener),
}

impl Visitor {
    fn round(&self) -> bool {
        match self {
            Self::Agent(node) => node.round(),
            Self::Control(control) => is_busy(control.round()),
            Self::Client(client, _) => is_busy(client.manual_round()),
            Self::Pipe(ends, _) => ends
                .each_ref()
                .map(|end| is_busy(end.round()))
                .contains(&true),
            Self::Stranger(_) | Self::Silent(_) => false,
        }
    }

    /// Closes in order.
    fn close(&self) {
        match self {
            Self::Agent(node) => node.agent.close(),
            Self::Control(control) => control.close(),
            Self::Client(client, _) => client.close(),
            Self::Pipe(ends, _) => ends.iter().for_each(Pipe::stop),
            Self::Stranger(_) | Self::Silent(_) => {}
        }
        while self.round() {}
    }

    /// Starts the visitor's next operation; most works are dropped.
    fn go_on(&mut self, rng: &mut Rng) {
        match self {
            Self::Agent(node) => {
                for peer in node.agent.peers() {
                    node.transfer(rng, &peer);
                }
                drop(node.agent.drain());
            }
            Self::Control(control) => drop(control.drain()),
            Self::Client(client, selects) => use_buffer(client, selects, rng),
            Self::Pipe(..) | Self::Stranger(_) | Self::Silent(_) => {}
        }
    }
}

/// A client decides about its entries, and goes on; the works of its inserts are dropped.
fn use_buffer(client: &LookupBuffer, selects: &mut Vec<Operation<Selected>>, rng: &mut Rng) {
    selects.retain(|selected| {
        if let Some(Ok(Some(delivery))) = selected.result()
            && rng.one_of(2) == 0
        {
            delivery.consume();
        }
        !selected.is_completed()
    });
    let len = SIZES[rng.one_of(2) as usize];
    insert(client, rng, len, TIMEOUT);
    for _ in 0..rng.one_of(4) {
        selects.extend(client.select(LookupQuery::Any, Some(TIMEOUT), Then::GoOn));
    }
}

fn insert(buffer: &LookupBuffer, rng: &mut Rng, len: usize, timeout: Duration) {
    let tokens = vec![i64::from(rng.one_of(1000) as u16)];
    drop(buffer.insert(tokens, entry(len), Some(timeout), Then::GoOn));
}

fn serve(capacity_bytes: u64) -> LookupBuffer {
    let buffer = LookupBuffer::new(capacity_bytes);
    let serve = || buffer.serve("127.0.0.1:0", TOKEN, TRANSPORT, true);
    without_threads(serve).expect("served");
    buffer
}

fn connect_client(buffers: &[&LookupBuffer]) -> LookupBuffer {
    let addresses = buffers.iter().map(|buffer| buffer.address()).collect();
    let connect = || LookupBuffer::connect(addresses, TOKEN, TRANSPORT, true, TIMEOUT);
    let (client, connected) = without_threads(connect).expect("a client");
    drop(connected);
    client
}

/// A buffer, and a client of it and of one that stays.
fn connect_leaving(staying: &LookupBuffer) -> (LookupBuffer, LookupBuffer) {
    let buffer = serve(1 << 20);
    let client = connect_client(&[&buffer, staying]);
    (buffer, client)
}

pub(super) struct Visitors {
    buffer: LookupBuffer,
    /// A client, which stays, and its selects.
    client: LookupBuffer,
    selects: Vec<Operation<Selected>>,
    /// A buffer, which leaves, and a client of it and of the first one: it then loses both.
    leaving: (LookupBuffer, LookupBuffer),
    /// With whether they are silent from now on: their reactors are not run.
    here: Vec<(Visitor, bool)>,
}

pub(super) fn meta(len: usize) -> Meta {
    Meta {
        family: 2,
        dtype: "u1".to_owned(),
        shape: vec![len as u64],
    }
}

fn entry(len: usize) -> Items {
    let tensor = |len: usize| {
        Arc::new(Received {
            meta: if len > 0 { meta(len) } else { Meta::default() },
            buffer: (len > 0).then(|| Buffer::zeroed(len)),
        })
    };
    Items([0, 0, len, 0, 0].map(tensor))
}

impl Visitors {
    pub(super) fn new() -> Self {
        let buffer = serve(8 << 20);
        Self {
            client: connect_client(&[&buffer]),
            selects: Vec::new(),
            leaving: connect_leaving(&buffer),
            buffer,
            here: Vec::new(),
        }
    }

    pub(super) fn round(&self) -> bool {
        let responsive = self.here.iter().filter(|(_, is_silent)| !is_silent);
        let mut is_any_busy = is_busy(self.buffer.manual_round());
        let (buffer, client) = &self.leaving;
        for each in [&self.client, buffer, client] {
            is_any_busy |= is_busy(each.manual_round());
        }
        for (visitor, _) in responsive {
            is_any_busy |= visitor.round();
        }
        is_any_busy
    }

    pub(super) fn come(&mut self, rng: &mut Rng, agents: &mut Agents, ports: &Ports) {
        let visitor = match rng.one_of(7) {
            0 | 1 => Self::agent(rng, agents),
            2 => Self::port(rng, ports),
            3 => Visitor::Client(connect_client(&[&self.buffer]), Vec::new()),
            4 => Self::pipe(rng),
            5 => {
                let address = agents.prefill.address();
                let mut stream = TcpStream::connect(address).expect("it listens");
                if rng.one_of(2) == 0 {
                    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sent");
                }
                Visitor::Stranger(stream)
            }
            _ => {
                let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
                let address = listener.local_addr().expect("bound").to_string();
                drop(agents.decode.agent.connect(&address).expect("it runs"));
                Visitor::Silent(listener)
            }
        };
        self.here.push((visitor, false));
    }

    /// One of another token is refused, one with another transport cannot be reached.
    fn agent(rng: &mut Rng, agents: &mut Agents) -> Visitor {
        let token: &[u8] = if rng.one_of(6) == 0 { b"other" } else { TOKEN };
        let node = Node::new(transport(rng), token, Integrity::Auto);
        if rng.one_of(2) == 0 {
            drop(node.agent.connect(&agents.prefill.address()));
            drop(node.agent.connect(&agents.decode.address()));
        } else {
            drop(agents.decode.agent.connect(&node.address()));
            agents.load_from(&node, rng.id());
        }
        Visitor::Agent(node)
    }

    fn port(rng: &mut Rng, ports: &Ports) -> Visitor {
        let token: &[u8] = if rng.one_of(6) == 0 { b"other" } else { TOKEN };
        let (control, there) = (port(token), ports.address());
        let handoff = ports.open().unwrap_or_else(|| rng.id());
        control.watch(handoff, &there).expect("it runs");
        control.watch(rng.id(), &there).expect("it runs");
        let query = ControlQuery::Watched(rng.id());
        drop(control.query(&there, query, TIMEOUT).expect("it runs"));
        let here = control.address().expect("it listens").to_string();
        ports.decode.watch(rng.id(), &here).expect("it runs");
        Visitor::Control(control)
    }

    fn pipe(rng: &mut Rng) -> Visitor {
        let listen = || Pipe::listen("127.0.0.1:0", TOKEN, TRANSPORT, Duration::ZERO);
        let listening = without_threads(listen).expect("a pipe");
        let address = listening.address().expect("it listens").to_string();
        let connect = || {
            Pipe::connect(
                &address,
                TOKEN,
                TRANSPORT,
                Integrity::Auto,
                Duration::ZERO,
                TIMEOUT,
            )
        };
        let (sender, connected) = without_threads(connect).expect("a pipe");
        drop(connected);
        let len = SIZES[rng.one_of(2) as usize];
        let deadline = || Deadline::after(Some(TIMEOUT));
        let sent = sender.send(meta(len), Buffer::zeroed(len), deadline(), Then::GoOn);
        drop(sent.expect("it runs"));
        let received = listening.receive(None, deadline(), Then::GoOn);
        Visitor::Pipe([sender, listening], received.expect("it runs"))
    }

    pub(super) fn go_on(&mut self, rng: &mut Rng) {
        for (visitor, _) in &mut self.here {
            visitor.go_on(rng);
        }
        // The process that serves the buffer uses it too.
        let len = SIZES[rng.one_of(2) as usize];
        insert(&self.buffer, rng, len, TIMEOUT);
        use_buffer(&self.client, &mut self.selects, rng);
        self.leaving_goes_on(rng);
        match rng.one_of(20) {
            // Such an entry is never inserted.
            0 => {
                let query = LookupQuery::Tokens(vec![-1]);
                let selected = self.client.select(query, Some(TIMEOUT), Then::GoOn);
                self.selects.extend(selected);
            }
            // More than a client may have under way.
            1 => {
                for _ in 0..BURST {
                    insert(&self.client, rng, 0, TIMEOUT);
                }
                for _ in 0..BURST {
                    let selected = self
                        .client
                        .select(LookupQuery::Any, Some(TIMEOUT), Then::GoOn);
                    self.selects.extend(selected);
                }
            }
            _ => {}
        }
    }

    /// The buffer that leaves does so while its client waits for an entry, and another one comes.
    fn leaving_goes_on(&mut self, rng: &mut Rng) {
        let (buffer, client) = &self.leaving;
        match rng.one_of(20) {
            0 => {
                let query = LookupQuery::Tokens(vec![-1]);
                let selected = client.select(query, Some(TIMEOUT), Then::GoOn);
                self.selects.extend(selected);
                insert(client, rng, SIZES[0], TIMEOUT);
            }
            1 => buffer.close(),
            2 => self.leaving = connect_leaving(&self.buffer),
            _ => {}
        }
    }

    /// The client inserts and selects large entries, which are late when a part of them is there.
    pub(super) fn begin_large(&mut self, rng: &mut Rng) {
        let buffer = [&self.buffer, &self.client][rng.one_of(2) as usize];
        insert(buffer, rng, MANY_BYTES, LATE);
        let selected = self.client.select(LookupQuery::Any, Some(LATE), Then::GoOn);
        self.selects.extend(selected);
    }

    /// Some fall silent, some leave: in order, or all at once as if they were killed.
    pub(super) fn leave(&mut self, rng: &mut Rng) {
        let is_leaving = |(_, is_silent): &mut (Visitor, bool)| {
            *is_silent |= rng.one_of(12) == 0;
            rng.one_of(8) == 0
        };
        let leaving: Vec<_> = self.here.extract_if(.., is_leaving).collect();
        for (visitor, is_silent) in leaving {
            if !is_silent && rng.one_of(2) == 0 {
                visitor.close();
            }
        }
    }

    /// The entries that are left are consumed.
    pub(super) fn leave_all(&mut self) {
        self.here.clear();
        self.leaving.0.close();
        for selected in self.selects.drain(..) {
            if let Some(Ok(Some(delivery))) = selected.result() {
                delivery.consume();
            }
        }
        let next = || {
            self.buffer
                .select(LookupQuery::Any, Some(Duration::ZERO), Then::GoOn)
        };
        while let Some(Ok(Some(delivery))) = next().expect("open").result() {
            delivery.consume();
        }
    }

    pub(super) fn sizes(&self) -> Vec<(&'static str, Sizes)> {
        vec![
            ("lookup buffer", self.buffer.sizes()),
            ("client of the lookup buffer", self.client.sizes()),
            ("client of a buffer that leaves", self.leaving.1.sizes()),
        ]
    }
}
