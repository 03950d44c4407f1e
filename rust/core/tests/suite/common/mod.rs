//! What the tests share: where UCX is, every data path, other processes, and a peer that keeps to no rules.

mod log_lines;
pub mod pipes;
pub mod refusals;
pub mod relay;
pub mod sockets;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_core::checksum;
use kvpipe_core::ids::SessionId;
use kvpipe_core::net::codec::Writer;
use kvpipe_core::net::encryption::{Encryption, Offer};
use kvpipe_core::net::handshake::{Handshake, Step};
use kvpipe_core::net::identity::{Canary, Identity, SessionKind};
use kvpipe_core::net::secret::Secrets;
use kvpipe_core::transport::{MemoryPath, Transport};
use kvpipe_ucx::{
    Buffer, Config, Context, EndpointId, Event, Library, Memory, Payload, Search, Worker,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions};

pub const TOKEN: &[u8] = b"token of the tests";

/// The offer of a peer of agents and others whose frames are not sealed.
pub fn plain() -> Offer {
    Offer {
        encryption: Encryption::Off,
        is_loopback: true,
        host: String::new(),
    }
}
/// Longer than anything takes, also where a sanitizer slows it.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Within this, the loss of a peer is known.
pub const PROMPT: Duration = Duration::from_secs(2);

/// The first message of a session.
pub const HELLO: u8 = 0;
const HEARTBEAT: u8 = 32;
/// The frame by which a peer reports how it gets our bytes.
const DATA_PATH: u8 = 36;

const INSIDE: &str = "KVPIPE_TEST_INSIDE";
const PARENT: &str = "KVPIPE_TEST_PARENT";
const ROLE: &str = "KVPIPE_TEST_ROLE";
const ARGUMENT: &str = "KVPIPE_TEST_ARGUMENT";

/// Set in the machine of `tests/rdma`: the address of its RDMA device.
const LOCAL: &str = "KVPIPE_TEST_LOCAL";

/// Where reactors listen: loopback, but where the tests run over RDMA.
pub fn local() -> String {
    let address = std::env::var(LOCAL);
    format!("{}:0", address.as_deref().unwrap_or("127.0.0.1"))
}

/// Whether the tests run over RDMA, in the machine of `tests/rdma`.
pub fn is_rdma() -> bool {
    std::env::var_os(LOCAL).is_some()
}

/// Where UCX is, or None after printing why the test cannot run.
#[allow(clippy::print_stderr, reason = "a skipped test says why")]
pub fn ucx() -> Option<Search> {
    let explicit = std::env::var_os("KVPIPE_UCX_LIB").map(PathBuf::from);
    let search = Search {
        wheel_dir: explicit.is_none().then(wheel_dir).flatten(),
        explicit,
    };
    Library::load(&search)
        .map_err(|error| eprintln!("skipped: {error}"))
        .ok()
        .map(|_| search)
}

/// Where Python has UCX's wheel. A start of Python takes longer than most tests: it is asked only where nothing else says.
fn wheel_dir() -> Option<PathBuf> {
    let code = "import libucx; print(list(libucx.__path__)[0])";
    let output = Command::new("python3").args(["-c", code]).output().ok()?;
    let path = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| PathBuf::from(path.trim()))
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

/// Whether this is what a transport is called where its name is shown.
pub fn is_name(name: &str, transport: &Transport) -> bool {
    match transport {
        Transport::Ucx(_) => (name == "tcp") == is_tcp(),
        Transport::Memory(_) => name == "memory",
    }
}

/// Runs a test's body over UCX's own choice (CMA on one machine), then over TCP alone, which takes a process with
/// another environment.
pub fn on_both_paths(body: impl FnOnce(&Search)) {
    let Some(search) = ucx() else { return };
    body(&search);
    if std::env::var_os(INSIDE).is_none() {
        run_alone(&[("KVPIPE_DATA_PATH", "tcp")]);
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

/// Whether bytes move by messages: the environment says so, or there is no CMA (before UCX 1.20) and no RDMA.
pub fn is_tcp() -> bool {
    std::env::var("UCX_TLS").map_or_else(|_| !has_cma(), |tls| tls == "tcp")
}

fn has_cma() -> bool {
    let library = ucx().and_then(|search| Library::load(&search).ok());
    library.is_some_and(|library| library.version() >= (1, 20, 0))
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

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("wait")
    }

    /// Declares to `tests/deaths.py`, where that runs the tests, that this process dies by a segmentation fault.
    pub fn expect_segmentation_fault(&self) {
        if let Some(path) = std::env::var_os("KVPIPE_TEST_DEATHS") {
            let expected = std::fs::File::options().append(true).open(path);
            let line = format!("SIGSEGV {}\n", self.child.id());
            (expected.expect("opened").write_all(line.as_bytes())).expect("written");
        }
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
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(Instant::now() < deadline, "not seen in time: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Sleeps until UCX or the socket has something, and for some milliseconds at most.
pub fn sleep_until_event(worker: &Worker, socket: Option<&TcpStream>) {
    if !worker.arm().expect("arm") {
        return;
    }
    let descriptors = std::iter::once(worker.event_fd()).chain(socket.map(AsFd::as_fd));
    let mut polled: Vec<_> = descriptors
        .map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN))
        .collect();
    let limit = Timespec {
        tv_sec: 0,
        tv_nsec: 5_000_000,
    };
    let _ = poll(&mut polled, Some(&limit));
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

/// A peer that is authenticated but says what it likes.
pub struct Raw {
    pub stream: TcpStream,
    pub session_id: SessionId,
    /// The frame with which the handshake ends, while it is held back.
    ready: Vec<u8>,
    _canary: Arc<Memory>,
    pub context: Arc<Context>,
    pub worker: Worker,
    pub endpoint: EndpointId,
}

impl Raw {
    /// Establishes a session.
    pub fn connect(search: &Search, address: SocketAddr, kind: SessionKind) -> Self {
        let mut raw = Self::connect_without_data_path(search, address, kind);
        let data_path = Writer::new(DATA_PATH).u8((!is_tcp()).into());
        let data_path = data_path.str("any").finish();
        send_frame(&mut raw.stream, &data_path);
        raw
    }

    /// Establishes a session whose other side has reported its data path, and waits for this side's.
    pub fn connect_without_data_path(
        search: &Search,
        address: SocketAddr,
        kind: SessionKind,
    ) -> Self {
        let mut raw = Self::begin(search, address, kind);
        raw.send_ready();
        raw.send(&[HELLO], &[]);
        raw.message(HELLO);
        while raw.worker.outstanding() > 0 {
            raw.worker.progress();
        }
        raw.receive_data_path();
        raw
    }

    /// Sends the last frame of the handshake.
    pub fn send_ready(&mut self) {
        let ready = std::mem::take(&mut self.ready);
        send_frame(&mut self.stream, &ready);
    }

    /// Works until the other side has reported its data path: only then may a peer send more.
    fn receive_data_path(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        self.stream.set_nonblocking(true).expect("nonblocking");
        while self.stream.peek(&mut [0]).is_err() {
            assert!(Instant::now() < deadline, "no data path");
            self.worker.progress();
            sleep_until_event(&self.worker, Some(&self.stream));
        }
        self.stream.set_nonblocking(false).expect("blocking");
        let mut frame = receive_frame(&mut self.stream).expect("frame");
        while frame[0] == HEARTBEAT {
            frame = receive_frame(&mut self.stream).expect("frame");
        }
        assert_eq!(frame[0], DATA_PATH);
    }

    /// Shakes hands but for the last frame.
    pub fn begin(search: &Search, address: SocketAddr, kind: SessionKind) -> Self {
        let mut config = Config::new();
        config.pin("NET_DEVICES", "lo");
        let library = Library::load(search).expect("UCX");
        let context = Context::new(library, &config).expect("context");
        let worker = Worker::new(&context).expect("worker");
        let mut ours = Identity::new(kind, "raw", Vec::new()).expect("identity");
        ours.ucx_address = worker.address().expect("address");
        let canary = context
            .register(Buffer::zeroed(Canary::LEN))
            .expect("register");
        ours.canary = Some(Canary {
            pid: std::process::id(),
            address: canary.buffer().address() as u64,
            rkey: canary.pack_rkey().expect("rkey"),
            checksum: checksum::of(&bytes(canary.buffer())),
        });
        let mut stream = TcpStream::connect(address).expect("connect");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
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
                Step::Admitted {
                    frame,
                    session_id,
                    peer,
                } => {
                    let peer = peer.expect("the client is ready");
                    // SAFETY: the peer's worker has written it.
                    let endpoint = unsafe { worker.connect(&peer.ucx_address) };
                    let endpoint = endpoint.expect("endpoint");
                    return Self {
                        stream,
                        session_id,
                        ready: frame,
                        _canary: canary,
                        context,
                        worker,
                        endpoint,
                    };
                }
                step => panic!("unexpected {step:?}"),
            }
        }
    }

    /// Sends an active message: type and the rest of the header after the session id.
    pub fn send(&self, header: &[u8], payload: &[u8]) {
        let header = [&self.session_id[..], header].concat();
        let payload = Payload::Bytes(payload.to_vec());
        self.worker
            .am_send(self.endpoint, header, payload, 0)
            .expect("send");
    }

    /// Waits for an active message whose type is `kind`: the rest of its header, and its payload.
    pub fn message(&self, kind: u8) -> (Vec<u8>, Vec<u8>) {
        self.message_within(kind, PATIENCE)
            .unwrap_or_else(|| panic!("no message {kind}"))
    }

    /// As [`message`](Self::message); `None` when there is none in time.
    pub fn message_within(&self, kind: u8, patience: Duration) -> Option<(Vec<u8>, Vec<u8>)> {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            self.worker.progress();
            while let Some(event) = self.worker.next_event() {
                if let Event::Message { header, data } = event
                    && header.get(16) == Some(&kind)
                {
                    return Some((header[17..].to_vec(), data.to_vec()));
                }
            }
            sleep_until_event(&self.worker, None);
        }
        None
    }

    /// Works until the other side has closed the connection, sooner than it would for silence.
    pub fn is_closed(&mut self) -> bool {
        self.stream
            .set_read_timeout(Some(Duration::from_millis(5)))
            .expect("timeout");
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            self.worker.progress();
            match self.stream.read(&mut [0; 4096]) {
                Ok(0) => return true,
                Err(error)
                    if !matches!(
                        error.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                    ) =>
                {
                    return true;
                }
                _ => {}
            }
        }
        false
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
