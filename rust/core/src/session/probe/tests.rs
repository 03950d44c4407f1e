use std::net::Ipv4Addr;

use kvpipe_ucx::Event;

use super::*;
use crate::net::identity::SessionKind;
use crate::transport::{MemoryPath, Transport, Worker};

const SESSION: SessionKey = 20;
const MEMORY: &str = "memory";

/// A session that is about to be probed, with the peer's worker and canary.
struct Fixture {
    cx: ReactorContext,
    peer: Worker,
    canary: Arc<Memory>,
    identity: Identity,
}

impl Fixture {
    /// Lanes that read memory.
    fn new() -> Self {
        Self::over(MemoryPath::RemoteRead)
    }

    fn over(path: MemoryPath) -> Self {
        let transport = Transport::Memory(path);
        let open = || transport.open(Ipv4Addr::LOCALHOST.into()).unwrap();
        let (context, peer) = (open(), open().worker().unwrap());
        let canary = new_canary(&context).unwrap();
        let mut cx = ReactorContext::manual(Some(open()));
        cx.add_manual(SESSION, [1; 16], None);
        cx.open_endpoint(SESSION, &peer.address().unwrap()).unwrap();
        let mut identity = Identity::new(SessionKind::Pipe, "", Vec::new()).unwrap();
        identity.canary = Some(Canary {
            pid: std::process::id(),
            address: canary.buffer().address() as u64,
            rkey: canary.pack_rkey().unwrap(),
            checksum: checksum_of(canary.buffer()).unwrap(),
        });
        Self {
            cx,
            peer,
            canary,
            identity,
        }
    }

    fn begin(&mut self) {
        let session = self.cx.sessions.get_mut(&SESSION).unwrap();
        session.state = SessionState::Establishing(Box::new(self.identity.clone()));
        self.cx.probe(SESSION);
    }

    /// Handles what the worker reports.
    fn run(&mut self) {
        self.cx.data.as_ref().unwrap().worker.progress();
        while let Some(event) = self.cx.data.as_ref().unwrap().worker.next_event() {
            match event {
                Event::Done { token, result } if canary_of(token).is_some() => {
                    assert_eq!(canary_of(token), Some(SESSION));
                    self.cx.finish_probe(SESSION, result);
                }
                Event::EndpointFailed { status, .. } => self.cx.fail_endpoint(SESSION, status),
                _ => {}
            }
        }
    }

    fn probed(mut self) -> Option<DataPath> {
        self.begin();
        self.run();
        self.cx.data_path(SESSION)
    }

    fn canary(&mut self) -> &mut Canary {
        self.identity.canary.as_mut().unwrap()
    }
}

fn stream() -> DataPath {
    DataPath::Stream(MEMORY.to_owned())
}

#[test]
fn a_session_reads_once_its_canary_has_come_right_and_not_before() {
    let mut it = Fixture::new();
    it.begin();
    assert_eq!(it.cx.data_path(SESSION), None);
    it.run();
    let read = DataPath::RemoteRead(MEMORY.to_owned());
    assert_eq!(it.cx.data_path(SESSION), Some(read.clone()));
    assert!(
        !it.cx.is_probed(SESSION),
        "the peer has not reported its own"
    );
    it.cx.receive_data_path(SESSION, read).unwrap();
    assert!(it.cx.is_probed(SESSION));
}

#[test]
fn a_session_whose_lanes_read_nothing_streams_at_once() {
    let mut it = Fixture::over(MemoryPath::Stream);
    it.begin();
    assert_eq!(it.cx.data_path(SESSION), Some(stream()));
    assert!(!it.cx.endpoint(SESSION).unwrap().paths.has_reason);
}

#[test]
fn a_canary_with_other_bytes_makes_the_session_stream_and_no_lane_is_believed() {
    let mut it = Fixture::new();
    assert!(it.canary.buffer().write(Canary::LEN - 1, &[0]));
    it.canary().checksum ^= 1;
    it.begin();
    assert!(!it.cx.endpoint(SESSION).unwrap().lanes.is_empty());
    it.run();
    assert_eq!(it.cx.data_path(SESSION), Some(stream()));
    assert!(it.cx.endpoint(SESSION).unwrap().lanes.is_empty());
    assert!(!it.cx.has_failed(SESSION));
}

#[test]
fn a_canary_that_cannot_be_read_makes_the_session_stream() {
    let mut unknown_key = Fixture::new();
    unknown_key.canary().rkey = vec![1];
    assert_eq!(unknown_key.probed(), Some(stream()));
    let mut out_of_range = Fixture::new();
    out_of_range.canary().address += 1;
    assert_eq!(out_of_range.probed(), Some(stream()));
    let mut none = Fixture::new();
    none.identity.canary = None;
    assert_eq!(none.probed(), Some(stream()));
}

#[test]
fn a_session_whose_endpoint_ends_with_the_canary_is_lost_and_the_error_names_it() {
    let mut it = Fixture::new();
    it.begin();
    drop(it.peer);
    let peer = Transport::Memory(MemoryPath::RemoteRead).open(Ipv4Addr::LOCALHOST.into());
    it.peer = peer.unwrap().worker().unwrap();
    it.run();
    let session = it.cx.sessions.get(&SESSION).unwrap();
    let error = session.failure.as_ref().unwrap().to_string();
    assert!(
        error.contains("its canary could not be read over memory"),
        "{error}"
    );
    assert!(error.contains("UCX_TLS=tcp"), "{error}");
}

#[test]
fn a_data_path_that_changes_is_reported_once_the_session_is_up() {
    let mut it = Fixture::new();
    it.begin();
    it.run();
    assert!(it.cx.changed_paths.is_empty(), "reported with the session");
    assert!(it.cx.sessions.get_mut(&SESSION).unwrap().finish().is_some());
    it.cx.switch_to_stream(SESSION, "a test");
    it.cx.switch_to_stream(SESSION, "a test");
    assert_eq!(it.cx.data_path(SESSION), Some(stream()));
    assert_eq!(it.cx.changed_paths, [SESSION]);
}

#[test]
fn lanes_of_cma_are_read_by_calls_of_our_own_or_not_at_all() {
    let lane = |transport: &str| Lane {
        transport: transport.to_owned(),
        device: "any".to_owned(),
        is_rma: true,
        is_am: false,
        domain: Some(1),
        remote_domain: Some(1),
    };
    let mut it = Fixture::new();
    let cma = [lane("cma")];
    assert!(matches!(
        Probe::of(&cma, &it.identity, true),
        Probe::Process(_)
    ));
    // UCX may use any of its lanes.
    let both = [lane("rc_mlx5"), lane("cma")];
    assert!(
        matches!(Probe::of(&both, &it.identity, true), Probe::Get(transport) if transport == "rc_mlx5")
    );
    it.canary().checksum ^= 1;
    for lanes in [&cma[..], &both] {
        let refused = Probe::of(lanes, &it.identity, true);
        assert!(matches!(refused, Probe::Refused(reason) if reason.contains("is not the peer")));
    }
    let rdma = [lane("rc_mlx5")];
    assert!(matches!(
        Probe::of(&rdma, &it.identity, false),
        Probe::Get(_)
    ));
}
