//! Workers on other threads and in other processes, for the tests to talk to.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvpipe_ucx::{
    Buffer, Config, Context, EndpointId, Event, Get, Library, Memory, MemoryKind, RemoteKey,
    Search, Token, Worker,
};

/// Size of the memory that a peer opens to its visitors.
pub const REGION_BYTES: usize = 4 << 20;
/// Of the bytes in each node's region.
pub const REGION_SEED: u64 = 9;
pub const TIMEOUT: Duration = Duration::from_secs(20);
const SOCKET: &str = "KVPIPE_TEST_SOCKET";
const TLS: &str = "KVPIPE_TEST_TLS";
const ALONE: &str = "KVPIPE_TEST_ALONE";

/// Names the transports: UCX's choice, or TCP alone, which stands for what waits for the network.
pub const TRANSPORTS: [Option<&str>; 2] = [None, Some("tcp")];

/// UCX, or None after printing why the test cannot run.
#[allow(clippy::print_stderr, reason = "a skipped test says why")]
pub fn library() -> Option<Arc<Library>> {
    let explicit = std::env::var_os("KVPIPE_UCX_LIB").map(PathBuf::from);
    let search = Search {
        wheel_dir: explicit.is_none().then(wheel_dir).flatten(),
        explicit,
    };
    Library::load(&search)
        .map_err(|error| eprintln!("skipped: {error}"))
        .ok()
}

/// Directory of UCX's wheel, as Python finds it. A start of Python takes longer than most tests: it is the last resort.
fn wheel_dir() -> Option<PathBuf> {
    let code = "import libucx; print(list(libucx.__path__)[0])";
    let output = Command::new("python3").args(["-c", code]).output().ok()?;
    let path = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| PathBuf::from(path.trim()))
}

pub fn context(library: &Arc<Library>, tls: Option<&str>) -> Arc<Context> {
    let mut config = Config::new();
    // Otherwise a connection to a stopped peer blocks the thread.
    config.set("TCP_CONN_NB", "y");
    if let Some(tls) = tls {
        config.pin("TLS", tls);
    }
    if std::env::var_os("UCX_TLS").is_none() {
        // Others come and go with other tests of this machine (tests/hosts), and a worker needs all that its context saw.
        config.pin("NET_DEVICES", "lo");
    }
    Context::new(Arc::clone(library), &config).expect("context")
}

/// A worker with one region, and what it knows of its peer.
pub struct Node {
    pub context: Arc<Context>,
    // Dropped before the region: over TCP it serves reads in software, also while it ends.
    pub worker: Worker,
    pub region: Arc<Memory>,
}

impl Node {
    pub fn new(context: Arc<Context>) -> Self {
        let worker = Worker::new(&context).expect("worker");
        let region = context
            .register(Buffer::from_vec(pattern(REGION_BYTES, REGION_SEED)))
            .expect("region");
        Self {
            context,
            worker,
            region,
        }
    }

    /// Progresses, asleep when there is nothing to do, until `pick` finds what it looks for.
    pub fn wait<T>(
        &self,
        patience: Duration,
        mut pick: impl FnMut(Event) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            let idle = self.worker.progress() == 0;
            while let Some(event) = self.worker.next_event() {
                if let Some(found) = pick(event) {
                    return Some(found);
                }
            }
            if idle && self.worker.arm().expect("arm") {
                sleep_on(&self.worker, 10);
            }
        }
        None
    }

    /// Waits for one operation and returns how it ended; other events are lost.
    pub fn done(&self, wanted: Token) -> Result<(), kvpipe_ucx::Status> {
        let is_it = |event| match event {
            Event::Done { token, result } if token == wanted => Some(result),
            _ => None,
        };
        self.wait(TIMEOUT, is_it).expect("operation ends")
    }

    pub fn close(&self, endpoint: EndpointId) {
        self.worker.close(endpoint);
        let is_it = |event| match event {
            Event::Closed { endpoint: closed } if closed == endpoint => Some(()),
            _ => None,
        };
        self.wait(TIMEOUT, is_it).expect("endpoint closes");
    }

    fn card(&self) -> Card {
        Card {
            worker: self.worker.address().expect("address"),
            region: self.region.buffer().address() as u64,
            rkey: self.region.pack_rkey().expect("key"),
        }
    }
}

/// Waits for the worker's descriptor; true when it became readable.
pub fn sleep_on(worker: &Worker, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd {
        fd: worker.event_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd, and a count of one.
    unsafe { libc::poll(&raw mut poll, 1, timeout_ms) == 1 }
}

/// Addresses and key by which another node reaches this one.
pub struct Card {
    pub worker: Vec<u8>,
    pub region: u64,
    pub rkey: Vec<u8>,
}

impl Card {
    fn send(&self, stream: &mut UnixStream) {
        for part in [&self.worker[..], &self.region.to_le_bytes(), &self.rkey] {
            stream
                .write_all(&(part.len() as u64).to_le_bytes())
                .expect("send length");
            stream.write_all(part).expect("send part");
        }
    }

    fn receive(stream: &mut UnixStream) -> Self {
        let mut part = || {
            let mut len = [0; 8];
            stream.read_exact(&mut len).expect("receive length");
            let mut bytes = vec![0; usize::try_from(u64::from_le_bytes(len)).expect("length")];
            stream.read_exact(&mut bytes).expect("receive part");
            bytes
        };
        let worker = part();
        let region = u64::from_le_bytes(part().try_into().expect("eight bytes"));
        Self {
            worker,
            region,
            rkey: part(),
        }
    }
}

/// A node and its connection to a peer that opens its region.
pub struct Visitor {
    pub node: Node,
    pub endpoint: EndpointId,
    pub card: Card,
    _stream: UnixStream,
}

impl Visitor {
    fn new(context: Arc<Context>, mut stream: UnixStream) -> Self {
        let node = Node::new(context);
        node.card().send(&mut stream);
        let card = Card::receive(&mut stream);
        // SAFETY: a worker has written this address.
        let endpoint = unsafe { node.worker.connect(&card.worker) }.expect("connect");
        Self {
            node,
            endpoint,
            card,
            _stream: stream,
        }
    }

    pub fn key(&self) -> RemoteKey {
        self.node
            .worker
            .unpack_rkey(self.endpoint, &self.card.rkey, MemoryKind::Host)
            .expect("unpack")
    }

    /// Waits until the endpoint has connected.
    pub fn greet(&self) {
        let flushed = self.node.worker.flush(self.endpoint, u64::MAX);
        flushed.expect("flush");
        assert_eq!(self.node.done(u64::MAX), Ok(()));
    }
}

/// Lets the visitor read until the stream ends.
fn serve(context: Arc<Context>, mut stream: UnixStream) {
    let node = Node::new(context);
    let peer = Card::receive(&mut stream);
    node.card().send(&mut stream);
    stream.set_nonblocking(true).expect("non-blocking");
    // SAFETY: a worker has written this address.
    unsafe { node.worker.connect(&peer.worker) }.expect("connect");
    let is_open = |stream: &mut UnixStream| !matches!(stream.read(&mut [0]), Ok(0));
    while is_open(&mut stream) {
        node.wait(Duration::from_millis(50), |_| None::<()>);
    }
}

/// A visitor of a peer on another thread, which ends when the visitor is dropped.
pub fn visit_thread(library: &Arc<Library>, tls: Option<&str>) -> Visitor {
    let (ours, theirs) = UnixStream::pair().expect("socket pair");
    let shared = context(library, tls);
    let context = Arc::clone(&shared);
    std::thread::spawn(move || serve(context, theirs));
    Visitor::new(shared, ours)
}

/// A process that is killed at the end of the test at the latest.
pub struct Peer(pub Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Stops a process. The signal is on its way when `kill` is done: it goes on for as long as that takes.
pub fn stop(peer: &Peer) {
    let pid = peer.0.id().to_string();
    let sent = Command::new("kill").args(["-STOP", &pid]).status();
    assert!(sent.expect("kill").success());
    while !is_stopped(&pid) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Lets a stopped process go on.
pub fn go_on(peer: &Peer) {
    let pid = peer.0.id().to_string();
    let sent = Command::new("kill").args(["-CONT", &pid]).status();
    assert!(sent.expect("kill").success());
}

fn is_stopped(pid: &str) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads");
    threads.flatten().all(|thread| {
        std::fs::read_to_string(thread.path().join("stat")).is_ok_and(|stat| stat.contains(") T "))
    })
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

/// Runs a test's body in a process of its own: it counts what the process holds, and other tests hold some of it.
pub fn alone(body: impl FnOnce(&Arc<Library>)) {
    let Some(library) = library() else { return };
    if std::env::var_os(ALONE).is_some() {
        return body(&library);
    }
    let output = run_test(&current_test()).env(ALONE, "1").output();
    let output = output.expect("run");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "{}\n{stdout}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Starts the test `name` beside the running test in a process of its own.
pub fn child(name: &str, env: &[(&str, &str)]) -> Peer {
    let test = current_test();
    let (module, _) = test.rsplit_once("::").expect("a module's test");
    let mut command = run_test(&format!("{module}::{name}"));
    command.envs(env.iter().copied()).stdout(Stdio::null());
    Peer(command.spawn().expect("spawn"))
}

/// A visitor of a peer in another process. Beside the running test there must be a test `peer_process` that calls
/// [`serve_if_child`].
pub fn visit_process(library: &Arc<Library>, tls: Option<&str>) -> (Visitor, Peer) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("kvpipe-ucx-{}-{number}.sock", std::process::id());
    let path = std::env::temp_dir().join(name);
    let listener = UnixListener::bind(&path).expect("bind");
    let socket = path.to_str().expect("path is text");
    let peer = child(
        "peer_process",
        &[(SOCKET, socket), (TLS, tls.unwrap_or(""))],
    );
    let (stream, _) = listener.accept().expect("accept");
    std::fs::remove_file(&path).expect("remove socket");
    (Visitor::new(context(library, tls), stream), peer)
}

/// The body of the child's test; does nothing in the parent.
pub fn serve_if_child() {
    let Some(path) = std::env::var_os(SOCKET) else {
        return;
    };
    let tls = std::env::var(TLS).ok().filter(|tls| !tls.is_empty());
    let library = library().expect("the parent found UCX");
    let stream = UnixStream::connect(path).expect("connect to parent");
    serve(context(&library, tls.as_deref()), stream);
}

/// A read of `len` bytes at `remote` to `offset` of `local`.
pub fn get<'a>(
    local: &'a Arc<Memory>,
    (offset, len): (usize, usize),
    remote: u64,
    rkey: &'a RemoteKey,
    token: Token,
) -> Get<'a> {
    Get {
        local,
        offset,
        len,
        remote,
        rkey,
        token,
    }
}

/// Bytes that differ from place to place and from seed to seed.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mix = |i: usize| {
        (i as u64 ^ seed)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .to_be_bytes()[0]
    };
    (0..len).map(mix).collect()
}
