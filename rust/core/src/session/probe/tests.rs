use std::time::Duration;

use kvpipe_ucx::Event;

use super::super::session::SessionState;
use super::*;
use crate::logged::logged;
use crate::net::identity::SessionKind;
use crate::session::FarEnd;
use crate::transport::{MemoryPath, Transport, Worker};

const SESSION: SessionKey = 20;
const MEMORY: &str = "memory";

impl Links {
    /// Ends the probe of a session as one whose canary has come with other bytes.
    pub(crate) fn end_probe_with_other_bytes(&mut self, key: SessionKey) {
        let into = self.register(Buffer::zeroed(Canary::LEN)).unwrap();
        let rkey = into.pack_rkey().unwrap();
        let canary = CanaryRead {
            checksum: !checksum_of(into.buffer()).unwrap(),
            transport: MEMORY.to_owned(),
            _key: self.unpack_rkey(key, &rkey, MemoryKind::Host).unwrap(),
            into,
        };
        self.endpoint_mut(key).unwrap().paths.canary = Some(canary);
        self.finish_probe(key, Ok(()));
    }
}

/// A session that is about to be probed, with the peer's worker and canary.
struct Fixture {
    links: Links,
    peer: Worker,
    canary: Arc<Memory>,
    identity: Identity,
    _far: FarEnd,
}

impl Fixture {
    /// Lanes that read memory.
    fn new() -> Self {
        Self::over(MemoryPath::RemoteRead)
    }

    fn over(path: MemoryPath) -> Self {
        let transport = Transport::Memory(path);
        let open = || transport.open().unwrap();
        let (context, peer) = (open(), open().worker().unwrap().unwrap());
        let canary = new_canary(&context).unwrap();
        let mut links = Links::manual(Some(open()));
        let far = links.add_manual(SESSION, None);
        assert!(links.open_endpoint(SESSION, &peer.address().unwrap()));
        let mut identity = Identity::new(SessionKind::Pipe, "", Vec::new()).unwrap();
        identity.canary = Some(Canary {
            pid: std::process::id(),
            address: canary.buffer().address() as u64,
            rkey: canary.pack_rkey().unwrap(),
            checksum: checksum_of(canary.buffer()).unwrap(),
        });
        Self {
            links,
            peer,
            canary,
            identity,
            _far: far,
        }
    }

    fn begin(&mut self) {
        let session = self.links.sessions.get_mut(&SESSION).unwrap();
        session.state = SessionState::Establishing(Box::new(self.identity.clone()));
        self.links.probe(SESSION);
    }

    /// Handles what the worker reports.
    fn run(&mut self) {
        self.links.worker().unwrap().progress();
        while let Some(event) = self.links.worker().unwrap().next_event() {
            match event {
                Event::Done { token, result } if canary_of(token).is_some() => {
                    assert_eq!(canary_of(token), Some(SESSION));
                    self.links.finish_probe(SESSION, result);
                }
                Event::EndpointFailed { status, .. } => {
                    self.links.lose_devices(SESSION, &status.to_string());
                }
                _ => {}
            }
        }
    }

    /// The session is up.
    fn finish(&mut self) {
        let session = self.links.sessions.get_mut(&SESSION).unwrap();
        assert!(session.finish().is_some());
    }

    fn probed(mut self) -> Option<DataPath> {
        self.begin();
        self.run();
        self.links.data_path(SESSION)
    }

    fn canary(&mut self) -> &mut Canary {
        self.identity.canary.as_mut().unwrap()
    }
}

fn stream() -> DataPath {
    DataPath::Stream(TCP.to_owned())
}

#[test]
fn a_session_reads_once_its_canary_has_come_right_and_not_before() {
    let mut it = Fixture::new();
    it.begin();
    assert_eq!(it.links.data_path(SESSION), None);
    it.run();
    let read = DataPath::RemoteRead(MEMORY.to_owned());
    assert_eq!(it.links.data_path(SESSION), Some(read.clone()));
    assert!(
        !it.links.is_probed(SESSION),
        "the peer has not reported its own"
    );
    it.links.receive_data_path(SESSION, read).unwrap();
    assert!(it.links.is_probed(SESSION));
}

#[test]
fn a_session_whose_lanes_read_nothing_streams_at_once() {
    let mut it = Fixture::over(MemoryPath::Stream);
    it.begin();
    assert_eq!(it.links.data_path(SESSION), Some(stream()));
    assert_eq!(it.links.endpoint(SESSION).unwrap().paths.reason, None);
}

#[test]
fn a_canary_with_other_bytes_makes_the_session_stream_and_no_lane_is_believed() {
    let mut it = Fixture::new();
    assert!(it.canary.buffer().write(Canary::LEN - 1, &[0]));
    it.canary().checksum ^= 1;
    it.begin();
    assert!(!it.links.endpoint(SESSION).unwrap().lanes.is_empty());
    it.run();
    assert_eq!(it.links.data_path(SESSION), Some(stream()));
    assert!(it.links.endpoint(SESSION).unwrap().lanes.is_empty());
    assert!(!it.links.has_failed(SESSION));
}

#[test]
fn a_session_that_streams_logs_why_once_whatever_refuses_reads_afterwards() {
    let mut it = Fixture::new();
    it.canary().checksum ^= 1;
    let lines = logged(|| {
        it.begin();
        it.run();
        for _ in 0..100 {
            it.links.switch_to_stream(SESSION, "another reason");
        }
    });
    let reason = "its canary came with other bytes over memory";
    let remedy = "check the network cards and UCX, or set KVPIPE_DATA_PATH=tcp";
    let expected = format!("WARN session.stream peer=peer transport=tcp {reason}: {remedy}");
    assert_eq!(lines, [expected]);
    assert_eq!(it.links.advice(SESSION), None, "the log has it");
    let reason = format!("{reason}: {remedy}");
    assert_eq!(it.links.slow_reason(SESSION), Some(reason), "the first one");
}

#[test]
fn a_session_whose_lanes_are_unknown_streams_and_the_error_in_the_log_shows_them() {
    let mut it = Fixture::new();
    let identity = it.identity.clone();
    let printed = "lane[0]: 7:warp/drive";
    let lines = logged(|| {
        let error = LanesError::Unreadable(printed.to_owned());
        it.links.probe_lanes(SESSION, &identity, Err(error));
    });
    assert_eq!(it.links.data_path(SESSION), Some(stream()));
    let [line] = &lines[..] else {
        panic!("{lines:?}");
    };
    for part in [
        "ERROR session.lanes peer=peer",
        printed,
        "bytes are streamed",
        "report this with the version of UCX, none",
    ] {
        assert!(line.contains(part), "{line} lacks {part}");
    }
    assert!(!it.links.has_failed(SESSION));
}

#[test]
fn a_session_whose_endpoint_cannot_be_used_streams_and_the_log_says_why() {
    let mut it = Fixture::new();
    let identity = it.identity.clone();
    let session = it.links.sessions.get_mut(&SESSION).unwrap();
    session.state = SessionState::Establishing(Box::new(identity.clone()));
    let status = kvpipe_ucx::Status {
        code: -25,
        call: "ucp_ep_print_info",
    };
    let lines = logged(|| {
        let error = LanesError::Unusable(status);
        it.links.probe_lanes(SESSION, &identity, Err(error));
    });
    assert!(!it.links.has_failed(SESSION));
    assert!(!it.links.has_devices(SESSION));
    assert_eq!(it.links.data_path(SESSION), Some(stream()));
    assert!(
        lines[0].starts_with("WARN session.devices_lost peer=peer"),
        "{lines:?}"
    );
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
fn a_session_whose_endpoint_ends_with_the_canary_streams_and_the_log_says_why() {
    let mut it = Fixture::new();
    it.begin();
    drop(it.peer);
    let peer = Transport::Memory(MemoryPath::RemoteRead).open();
    it.peer = peer.unwrap().worker().unwrap().unwrap();
    let lines = logged(|| it.run());
    assert!(!it.links.has_failed(SESSION));
    assert_eq!(it.links.data_path(SESSION), Some(stream()));
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0].starts_with("WARN session.devices_lost peer=peer its canary"),
        "{lines:?}"
    );
}

#[test]
fn a_data_path_that_changes_is_reported_once_the_session_is_up() {
    let mut it = Fixture::new();
    it.begin();
    it.run();
    assert!(
        it.links.changed_paths.is_empty(),
        "reported with the session"
    );
    it.finish();
    it.links.switch_to_stream(SESSION, "a test");
    it.links.switch_to_stream(SESSION, "a test");
    assert_eq!(it.links.data_path(SESSION), Some(stream()));
    assert_eq!(it.links.changed_paths, [SESSION]);
}

/// A session that is up, both of whose sides read, and the memory that the peer exposes.
fn reading() -> Fixture {
    let mut it = Fixture::new();
    it.begin();
    it.run();
    let read = DataPath::RemoteRead(MEMORY.to_owned());
    it.links.receive_data_path(SESSION, read).unwrap();
    it.finish();
    it
}

/// Posts a read of the canary, which ends when the worker is run.
fn post_read(it: &mut Fixture) {
    let (into, canary) = (
        it.links.register(Buffer::zeroed(Canary::LEN)).unwrap(),
        it.canary().clone(),
    );
    let key = it
        .links
        .unpack_rkey(SESSION, &canary.rkey, MemoryKind::Host)
        .unwrap();
    let get = Get {
        local: &into,
        offset: 0,
        len: Canary::LEN,
        remote: canary.address,
        key: &key,
        token: 1,
    };
    assert!(it.links.get(SESSION, get));
}

#[test]
fn a_side_whose_peer_can_read_no_more_ends_its_own_reads() {
    let mut it = reading();
    post_read(&mut it);
    it.links.receive_data_path(SESSION, stream()).unwrap();
    assert!(!it.links.has_devices(SESSION));
    let ended = it.links.next_ended_read();
    assert!(matches!(ended, Some((1, Err(_)))), "{ended:?}");
    assert_eq!(it.links.data_path(SESSION), Some(stream()));
    assert!(!it.links.has_failed(SESSION));
}

#[test]
fn a_side_that_reads_by_the_kernel_keeps_its_devices_for_gpus_when_its_peers_have_failed() {
    let mut it = reading();
    let read = DataPath::RemoteRead(CMA.to_owned());
    it.links.set_data_path(SESSION, read);
    it.links.receive_data_path(SESSION, stream()).unwrap();
    assert!(it.links.has_devices(SESSION));
}

#[test]
fn reads_stand_still_once_none_has_ended_for_as_long_as_a_peer_may_be_silent() {
    let mut it = reading();
    let begun = it.links.now;
    let silence = it.links.timeouts().silence;
    let stands_still = |it: &mut Fixture, after| {
        it.links.now = begun + after;
        it.links.stands_still(SESSION)
    };
    assert!(!stands_still(&mut it, silence), "none is in flight");
    post_read(&mut it);
    assert!(!stands_still(&mut it, 2 * silence), "since then");
    post_read(&mut it);
    assert!(it.links.next_ended_read().is_some());
    assert!(!stands_still(&mut it, 3 * silence), "one has ended");
    assert!(!stands_still(&mut it, silence * 39 / 10));
    assert!(stands_still(&mut it, 4 * silence));
    assert!(it.links.next_ended_read().is_some());
    assert!(!stands_still(&mut it, 5 * silence), "all have ended");
}

#[test]
fn reads_have_ten_seconds_also_where_a_peer_may_be_silent_for_less() {
    let mut it = reading();
    it.links.config.timeouts.silence = Duration::from_secs(1);
    post_read(&mut it);
    let begun = it.links.now;
    for (after, stands_still) in [(0, false), (9, false), (10, true)] {
        it.links.now = begun + Duration::from_secs(after);
        assert_eq!(it.links.stands_still(SESSION), stands_still, "{after} s");
    }
}

#[test]
fn what_connects_devices_has_a_limit_of_its_own() {
    let mut it = Fixture::new();
    it.begin();
    let begun = it.links.now;
    for after in [0, 60] {
        it.links.now = begun + Duration::from_secs(after);
        assert!(!it.links.stands_still(SESSION), "the canary is in flight");
    }
}

#[test]
fn a_process_of_this_host_is_read_by_calls_of_our_own_whatever_lanes_there_are() {
    let mut it = Fixture::new();
    let rdma = [Lane {
        transport: "rc_mlx5".to_owned(),
        device: "any".to_owned(),
        is_rma: true,
        domain: Some(1),
        remote_domain: Some(1),
    }];
    for lanes in [&[][..], &rdma] {
        let probe = Probe::of(lanes, &it.identity, true);
        assert!(matches!(probe, Probe::Process(_)));
    }
    assert!(matches!(Probe::of(&[], &it.identity, false), Probe::Stream));
    it.canary().checksum ^= 1;
    let refused = Probe::of(&[], &it.identity, true);
    assert!(matches!(refused, Probe::Refused(reason) if reason.contains("is not the peer")));
    for reads_process in [true, false] {
        let probe = Probe::of(&rdma, &it.identity, reads_process);
        assert!(matches!(probe, Probe::Get(transport) if transport == "rc_mlx5"));
    }
}

#[test]
fn what_carries_bytes_of_gpus_is_shown_and_changes_nothing_for_the_hosts() {
    let mut it = Fixture::new();
    it.begin();
    it.run();
    let read = DataPath::RemoteRead(MEMORY.to_owned());
    it.links.receive_data_path(SESSION, read.clone()).unwrap();
    let shown = |it: &Fixture| it.links.shown_transport(SESSION).unwrap();
    assert_eq!(shown(&it), MEMORY);
    it.links
        .note_gpu_transport(SESSION, Some("cuda_ipc".to_owned()));
    assert_eq!(shown(&it), "cuda_ipc");
    assert_eq!(it.links.data_path(SESSION), Some(read));
    it.links.note_gpu_transport(SESSION, None);
    assert_eq!(shown(&it), "tcp", "no lane reached it");
    let reason = it.links.slow_reason(SESSION).unwrap();
    assert!(reason.contains("are streamed, while memory reads host memory"));
}

#[test]
fn the_reason_for_a_slow_path_is_that_of_the_transport_that_is_shown() {
    let mut it = Fixture::new();
    it.begin();
    it.run();
    let refused = Some("process_vm_readv is refused".to_owned());
    it.links
        .switch_to_stream(SESSION, "process_vm_readv is refused");
    assert_eq!(it.links.slow_reason(SESSION), refused);
    it.links
        .note_gpu_transport(SESSION, Some("cuda_ipc".to_owned()));
    assert_eq!(it.links.slow_reason(SESSION), None);
    it.links.note_gpu_transport(SESSION, None);
    assert_eq!(it.links.slow_reason(SESSION), refused);
}
