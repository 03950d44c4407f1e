//! Helpers that the tests share: the location of UCX, every data path, other processes, and a peer that breaks the
//! protocol.

mod log_lines;
pub mod pipes;
pub mod refusals;
pub mod relay;
pub mod sockets;

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvpipe_core::checksum;
use kvpipe_core::control::ControlReply;
use kvpipe_core::net::codec::{Reader, Writer};
use kvpipe_core::net::encryption::{Encryption, EncryptionOffer};
use kvpipe_core::net::handshake::{Handshake, Step};
use kvpipe_core::net::identity::{Canary, Identity, SessionKind, host_id};
use kvpipe_core::net::secret::Secrets;
use kvpipe_core::transport::{MemoryPath, Transport};
use kvpipe_ucx::{Buffer, Library, Search};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions};

pub const TOKEN: &[u8] = b"token of the tests";

/// The offer of a peer on this host, whose frames are not sealed.
pub fn plain() -> EncryptionOffer {
    EncryptionOffer {
        encryption: Encryption::Auto,
        is_loopback: true,
        host: host_id(),
    }
}
/// Longer than anything takes, also where a sanitizer slows it.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// Within this, the loss of a peer is known.
pub const PROMPT: Duration = Duration::from_secs(2);

/// The frame of a message.
const MESSAGE: u8 = 33;
/// The frame with which a side closes.
const GOODBYE: u8 = 34;
/// The frame by which a peer reports how it gets our bytes.
const DATA_PATH: u8 = 36;
/// The frame of a part of a stream.
const STREAM: u8 = 37;
/// The kind of a stream's parts.
const DATA: u8 = 33;

const INSIDE: &str = "KVPIPE_TEST_INSIDE";
const PARENT: &str = "KVPIPE_TEST_PARENT";
const ROLE: &str = "KVPIPE_TEST_ROLE";
const ARGUMENT: &str = "KVPIPE_TEST_ARGUMENT";

/// Set in the machine of `tests/rdma`: the address of its RDMA device.
const LOCAL: &str = "KVPIPE_TEST_LOCAL";

/// Listen address of reactors: loopback, but for the tests that run over RDMA.
pub fn local() -> String {
    let address = std::env::var(LOCAL);
    format!("{}:0", address.as_deref().unwrap_or("127.0.0.1"))
}

/// True if the tests run over RDMA, in the machine of `tests/rdma`.
pub fn is_rdma() -> bool {
    std::env::var_os(LOCAL).is_some()
}

/// Search for UCX; if the tests run over RDMA and UCX cannot be loaded, prints the reason and returns `None`.
#[allow(clippy::print_stderr, reason = "a skipped test says why")]
pub fn ucx() -> Option<Search> {
    let explicit = std::env::var_os("KVPIPE_UCX_LIB").map(PathBuf::from);
    let search = Search {
        wheel_dir: None,
        explicit,
    };
    if !is_rdma() {
        return Some(search);
    }
    Library::load(&search)
        .map_err(|error| eprintln!("skipped: {error}"))
        .ok()
        .map(|_| search)
}

/// Runs a test's body in memory by either data path, then over UCX as [`on_both_paths`] does.
pub fn on_every_path(body: impl Fn(&Transport)) {
    if std::env::var_os(INSIDE).is_none() {
        for data_path in [MemoryPath::RemoteRead, MemoryPath::Stream] {
            body(&Transport::Memory(data_path));
        }
    }
    on_both_paths(|search| body(&search.clone().into()));
}

/// True if a transport is shown by this name.
pub fn is_name(name: &str, transport: &Transport) -> bool {
    match transport {
        Transport::Host(_) => (name == "tcp") == is_tcp(),
        Transport::Memory(MemoryPath::RemoteRead) => name == "memory",
        Transport::Memory(MemoryPath::Stream) => name == "tcp",
    }
}

/// Runs a test's body over UCX's own choice (CMA on one machine), then over TCP alone with several connections, which takes
/// a process with another environment.
pub fn on_both_paths(body: impl FnOnce(&Search)) {
    let Some(search) = ucx() else { return };
    body(&search);
    if std::env::var_os(INSIDE).is_none() {
        run_alone(&[("KVPIPE_DATA_PATH", "tcp"), ("KVPIPE_STREAMS", "3")]);
    }
}

/// Runs a test's body in a process of its own.
pub fn alone(body: impl FnOnce(&Search)) {
    if std::env::var_os(INSIDE).is_none() {
        return run_alone(&[]);
    }
    if let Some(search) = ucx() {
        body(&search);
    }
}

/// Runs the current test in another process.
fn run_alone(env: &[(&str, &str)]) {
    let test = current_test();
    let output = run_test(&test)
        .env(INSIDE, "1")
        .envs(env.iter().copied())
        .output()
        .expect("run");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "{test} with {env:?}: {}\n{stdout}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The full path of the running test: libtest gives it to the test's thread as its name.
fn current_test() -> String {
    let thread = std::thread::current();
    thread.name().expect("a test's own thread").to_owned()
}

/// A process that runs one test of this program.
fn run_test(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("own path"));
    command.args(["--exact", test, "--include-ignored", "--nocapture"]);
    command
}

/// True if bytes move by streams, by the environment.
pub fn is_tcp() -> bool {
    std::env::var("KVPIPE_DATA_PATH").is_ok_and(|path| path == "tcp")
}

/// Another process, which is killed at the end of the test at the latest.
pub struct Process {
    child: Child,
    said: BufReader<TcpStream>,
}

impl Process {
    /// Starts `role` of the test `peer_process` beside the running test.
    pub fn start(role: &str, argument: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address").to_string();
        let test = current_test();
        let (module, _) = test.rsplit_once("::").expect("a module's test");
        let child = run_test(&format!("{module}::peer_process"))
            .env(PARENT, address)
            .env(ROLE, role)
            .env(ARGUMENT, argument)
            .stdout(Stdio::null())
            .spawn()
            .expect("spawn");
        let (stream, _) = listener.accept().expect("accept");
        Self {
            child,
            said: BufReader::new(stream),
        }
    }

    /// The next line that it says.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).expect("a line");
        line.trim().to_owned()
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("kill");
    }

    pub fn stop(&self) {
        let stopped = Some(self.signal(Signal::STOP));
        rustix::process::waitpid(stopped, WaitOptions::UNTRACED).expect("stopped");
    }

    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) -> Pid {
        let pid = Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("signal");
        pid
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the other process: its role, its argument, and where to say something. None in the parent.
pub fn role() -> Option<(String, String, TcpStream)> {
    let role = std::env::var(ROLE).ok()?;
    let parent = std::env::var(PARENT).ok()?;
    let argument = std::env::var(ARGUMENT).unwrap_or_default();
    Some((
        role,
        argument,
        TcpStream::connect(parent).expect("connect to parent"),
    ))
}

pub fn say(parent: &mut TcpStream, line: &str) {
    parent
        .write_all(format!("{line}\n").as_bytes())
        .expect("say");
}

/// Waits to be killed; ends with the parent, should that forget.
pub fn wait_for_the_end(mut parent: TcpStream) {
    let _ = parent.read(&mut [0]);
}

/// Repeats until `find` finds something.
pub fn eventually<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(Instant::now() < deadline, "not seen in time: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes that differ from place to place and from seed to seed.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    const LINE: usize = 64;
    let seed = seed.wrapping_mul(0x51_7c_c1_b7_27_22_0a_95);
    let word = |i: u64| {
        let word = (i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (word ^ (word >> 32)).to_be_bytes()
    };
    let line: Vec<u8> = (0..LINE as u64 / 8).flat_map(word).collect();
    let mut bytes = line.repeat(len.div_ceil(LINE));
    // One word of each line has its place: unoptimised, more would be most of the time of tests with large tensors.
    for (i, line) in bytes.chunks_exact_mut(LINE).enumerate() {
        line[..8].copy_from_slice(&word((LINE + i) as u64));
    }
    bytes.truncate(len);
    bytes
}

pub fn bytes(buffer: &Buffer) -> Vec<u8> {
    buffer.bytes(0, buffer.len()).expect("host memory").to_vec()
}

/// The frame of a message.
pub fn message_frame(header: &[u8], payload: &[u8]) -> Vec<u8> {
    Writer::new(MESSAGE).bytes(header).raw(payload).finish()
}

/// The frame of a part of a stream, with this byte at its end.
pub fn part_frame(header: &[u8], payload: &[u8], end: u8) -> Vec<u8> {
    let len = u8::try_from(header.len()).expect("a short header");
    let head = Writer::new(STREAM).u8(len).raw(header);
    head.raw(payload).u8(end).finish()
}

/// An authenticated peer that sends arbitrary messages.
pub struct Raw {
    pub stream: TcpStream,
    /// Received bytes that are no whole frame yet.
    received: RefCell<Vec<u8>>,
    /// The frame with which the handshake ends, while it is held back.
    ready: Vec<u8>,
    /// The other side's first read.
    _canary: Buffer,
}

impl Raw {
    /// Establishes a session.
    pub fn connect(address: SocketAddr, kind: SessionKind) -> Self {
        let mut raw = Self::connect_without_data_path(address, kind);
        let data_path = Writer::new(DATA_PATH).u8((!is_tcp()).into());
        let data_path = data_path.str("any").finish();
        send_frame(&mut raw.stream, &data_path);
        raw
    }

    /// Establishes a session whose other side has reported its data path.
    pub fn connect_without_data_path(address: SocketAddr, kind: SessionKind) -> Self {
        let mut raw = Self::begin(address, kind);
        raw.send_ready();
        let frame = raw.frame(Instant::now() + TIMEOUT, |frame| frame[0] == DATA_PATH);
        assert!(frame.is_some(), "no data path");
        raw
    }

    /// Sends the last frame of the handshake.
    pub fn send_ready(&mut self) {
        let ready = std::mem::take(&mut self.ready);
        send_frame(&mut self.stream, &ready);
    }

    /// Shakes hands but for the last frame.
    pub fn begin(address: SocketAddr, kind: SessionKind) -> Self {
        let mut ours = Identity::new(kind, "raw", Vec::new()).expect("identity");
        let canary = Buffer::zeroed(Canary::LEN);
        ours.canary = Some(Canary {
            pid: std::process::id(),
            address: canary.address() as u64,
            rkey: Vec::new(),
            checksum: checksum::of(&bytes(&canary)),
        });
        let mut stream = TcpStream::connect(address).expect("connect");
        stream.set_read_timeout(Some(TIMEOUT)).expect("timeout");
        stream.set_nodelay(true).expect("no delay");
        let (mut handshake, hello) =
            Handshake::client(&Secrets::new(TOKEN), plain(), "raw").expect("handshake");
        let mut to_send = hello;
        loop {
            send_frame(&mut stream, &to_send);
            let mut frame = receive_frame(&mut stream).expect("frame");
            match handshake
                .frame(&mut frame, &ours, |_| Ok(()))
                .expect("accepted")
            {
                Step::Continue(frame) => to_send = frame,
                Step::Admitted { frame, .. } => {
                    return Self {
                        stream,
                        received: RefCell::default(),
                        ready: frame,
                        _canary: canary,
                    };
                }
                step => panic!("unexpected {step:?}"),
            }
        }
    }

    /// Sends a message, or a part of a stream, whose header begins with its kind.
    pub fn send(&self, header: &[u8], payload: &[u8]) {
        if header.first() == Some(&DATA) {
            return self.send_part(header, payload);
        }
        self.send_frame(&message_frame(header, payload));
    }

    /// Sends a part of a stream.
    pub fn send_part(&self, header: &[u8], payload: &[u8]) {
        self.send_frame(&part_frame(header, payload, 0));
    }

    /// Sends a frame of any bytes.
    pub fn send_frame(&self, frame: &[u8]) {
        self.write(&[&(frame.len() as u32).to_le_bytes()[..], frame].concat());
    }

    /// Sends any bytes. The other side may have closed the connection.
    pub fn write(&self, bytes: &[u8]) {
        let _ = (&self.stream).write_all(bytes);
    }

    /// The next frame.
    pub fn next_frame(&self) -> Vec<u8> {
        let frame = self.frame(Instant::now() + TIMEOUT, |_| true);
        frame.expect("a frame")
    }

    /// The other side's reason for closing the connection.
    pub fn goodbye(&self) -> String {
        let frame = self.frame(Instant::now() + TIMEOUT, |frame| frame[0] == GOODBYE);
        let frame = frame.expect("a goodbye");
        Reader::new(&frame[1..]).str(1 << 16).expect("a reason")
    }

    /// Waits for a message or a part of a stream whose type is `kind`: the rest of its header, and its payload.
    pub fn message(&self, kind: u8) -> (Vec<u8>, Vec<u8>) {
        self.message_within(kind, TIMEOUT)
            .unwrap_or_else(|| panic!("no message {kind}"))
    }

    /// As [`message`](Self::message); `None` when there is none in time.
    pub fn message_within(&self, kind: u8, patience: Duration) -> Option<(Vec<u8>, Vec<u8>)> {
        let split = |frame: &[u8]| {
            let mut reader = Reader::new(&frame[1..]);
            let (header, end) = match frame[0] {
                MESSAGE => (reader.bytes(1 << 20).ok()?, 0),
                STREAM => {
                    let len = reader.u8().ok()?;
                    (reader.raw(len.into()).ok()?, 1)
                }
                _ => return None,
            };
            let payload = reader.rest();
            let payload = payload[..payload.len() - end].to_vec();
            (header.first() == Some(&kind)).then(|| (header[1..].to_vec(), payload))
        };
        let frame = self.frame(Instant::now() + patience, |frame| split(frame).is_some());
        frame.and_then(|frame| split(&frame))
    }

    /// The next frame that is wanted, if it comes in time; others are dropped.
    fn frame(&self, deadline: Instant, is_wanted: impl Fn(&[u8]) -> bool) -> Option<Vec<u8>> {
        let mut received = self.received.borrow_mut();
        loop {
            while let Some((len, rest)) = received.split_first_chunk::<4>()
                && let Some(frame) = rest.get(..u32::from_le_bytes(*len) as usize)
            {
                let frame = frame.to_vec();
                received.drain(..4 + frame.len());
                if is_wanted(&frame) {
                    return Some(frame);
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let mut polled = [PollFd::new(&self.stream, PollFlags::IN)];
            let timeout = Timespec::try_from(left).expect("a timeout");
            if poll(&mut polled, Some(&timeout)) == Ok(0) {
                return None;
            }
            let mut bytes = vec![0; 64 << 10];
            match (&self.stream).read(&mut bytes) {
                Ok(0) | Err(_) => return None,
                Ok(len) => received.extend(&bytes[..len]),
            }
        }
    }

    /// Waits until the other side has closed the connection, sooner than it would for silence. Its heartbeats come meanwhile.
    pub fn is_closed(&mut self) -> bool {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.stream.set_read_timeout(Some(left)).expect("timeout");
            match self.stream.read(&mut [0; 4096]) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => {
                    return !matches!(
                        error.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                    );
                }
            }
        }
    }
}

pub fn send_frame(stream: &mut TcpStream, frame: &[u8]) {
    let len = u32::try_from(frame.len()).expect("length");
    let framed = [&len.to_le_bytes()[..], frame].concat();
    stream.write_all(&framed).expect("send frame");
}

pub fn receive_frame(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let mut frame = vec![0; u32::from_le_bytes(len) as usize];
    stream.read_exact(&mut frame)?;
    Ok(frame)
}

/// The description of an engine that has set none.
pub fn undescribed() -> ControlReply {
    ControlReply::Description("{}".to_owned())
}
