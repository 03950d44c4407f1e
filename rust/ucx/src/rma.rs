//! Reads of remote memory, and the keys that they need.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::rc::Rc;
use std::sync::Arc;

use crate::buffer::MemoryKind;
use crate::device_copy::may_unmap;
use crate::endpoint::EndpointId;
use crate::lane::Lane;
use crate::memory::Memory;
use crate::request::{self, Keep, Token};
use crate::status::{Status, check};
use crate::sys;
use crate::worker::{Inner, State, Worker};

/// Access to a peer's memory over one endpoint. It is an error to use it after the endpoint is closed.
#[derive(Debug)]
pub struct RemoteKey {
    pub(crate) key: Rc<Key>,
    /// The peer's memory domains that its owner has registered the memory with.
    domains: Domains,
}

impl Drop for RemoteKey {
    fn drop(&mut self) {
        let keys = &self.key.worker.state.keys;
        keys.set(keys.get().saturating_sub(1));
    }
}

/// Memory domains as the head of a packed key lists them, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Domains(u64);

impl Domains {
    /// The domains of a packed key; none if it is too short to be one.
    pub fn of(packed: &[u8]) -> Self {
        let head = packed.first_chunk();
        Self(head.map_or(0, |domains| u64::from_le_bytes(*domains)))
    }

    fn has(self, domain: Option<u32>) -> bool {
        domain.is_some_and(|domain| self.0.checked_shr(domain).is_some_and(|bits| bits & 1 == 1))
    }
}

/// True if a lane moves bytes from CUDA memory into CUDA memory by itself. Without such a lane, UCX serves a get in
/// software, over TCP too.
fn is_direct(lane: &Lane, here: Domains, there: Domains, is_mapped: bool) -> bool {
    let is_rdma = ["rc_", "dc_"]
        .iter()
        .any(|kind| lane.transport.starts_with(kind));
    let is_reached = match &lane.transport[..] {
        "cuda_ipc" => is_mapped,
        _ => is_rdma && here.has(lane.domain),
    };
    lane.is_rma && is_reached && there.has(lane.remote_domain)
}

/// The lane over which bytes move from CUDA memory into CUDA memory. Where the peer's memory is mapped a kernel copies it,
/// whatever other lanes there are.
fn direct_lane(lanes: &[Lane], here: Domains, there: Domains, is_mapped: bool) -> Option<&Lane> {
    let direct = lanes
        .iter()
        .filter(|lane| is_direct(lane, here, there, is_mapped));
    direct.min_by_key(|lane| lane.transport != "cuda_ipc")
}

/// The unpacked key, shared by its `RemoteKey` and the operations that use it.
pub(crate) struct Key {
    /// None once destroyed.
    handle: Cell<Option<NonNull<sys::ucp_rkey>>>,
    endpoint: EndpointId,
    worker: Rc<Inner>,
    uses: Cell<usize>,
    is_revoked: Cell<bool>,
}

impl Key {
    /// True if it is live, and the key of this endpoint.
    pub(crate) fn is_of(&self, endpoint: EndpointId) -> bool {
        self.endpoint == endpoint && self.handle.get().is_some()
    }

    /// Destroys the key now, or after the operations that use it.
    pub(crate) fn revoke(&self) {
        self.is_revoked.set(true);
        if self.uses.get() == 0 {
            self.destroy();
        }
    }

    fn destroy(&self) {
        if let Some(handle) = self.handle.take() {
            let _current = self.worker.enter();
            let destroy = || {
                // SAFETY: taken out, so destroyed once; no operation uses it: this runs at use count
                // zero, or on the last reference, and each use holds one. The Rc keeps the worker.
                unsafe { (self.worker.api().ucp_rkey_destroy)(handle.as_ptr()) };
            };
            may_unmap(self.worker.uses_gpu(), destroy);
        }
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        self.destroy();
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Key")
            .field("endpoint", &self.endpoint)
            .field("is_revoked", &self.is_revoked.get())
            .finish_non_exhaustive()
    }
}

/// One operation's use of a key, which defers its destruction.
pub(crate) struct KeyUse(Rc<Key>);

impl KeyUse {
    pub(crate) fn new(key: &Rc<Key>) -> Self {
        key.uses.set(key.uses.get() + 1);
        Self(Rc::clone(key))
    }
}

impl Drop for KeyUse {
    fn drop(&mut self) {
        self.0.uses.set(self.0.uses.get().saturating_sub(1));
        if self.0.is_revoked.get() {
            self.0.revoke();
        }
    }
}

/// A read that may still write to our memory.
pub(crate) struct Write(Rc<State>);

impl Write {
    pub(crate) fn new(state: &Rc<State>) -> Self {
        state.writes.set(state.writes.get() + 1);
        Self(Rc::clone(state))
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        self.0.writes.set(self.0.writes.get().saturating_sub(1));
    }
}

/// A read of remote memory.
#[derive(Clone, Copy, Debug)]
pub struct Get<'a> {
    /// The destination.
    pub local: &'a Arc<Memory>,
    /// Offset in `local` of the first byte.
    pub offset: usize,
    /// Number of bytes to read.
    pub len: usize,
    /// Their address in the peer's process.
    pub remote: u64,
    /// The peer's key.
    pub rkey: &'a RemoteKey,
    /// Comes back with `Done`.
    pub token: Token,
}

impl Worker {
    /// Reads a peer's memory. `Done` means that the bytes are there.
    ///
    /// # Errors
    /// `UCS_ERR_OUT_OF_RANGE` when the local piece is outside its memory or may only be read, `UCS_ERR_INVALID_PARAM`
    /// for memory of another context or a key of another endpoint, `UCS_ERR_NOT_CONNECTED` or the
    /// endpoint's failure, else the status of UCX. No `Done` follows an error.
    ///
    /// # Over TCP
    /// A get over TCP endangers the peer: UCX serves it in software, checks neither key nor range
    /// (an unmapped one kills the peer), and can abort the peer when this side closes or dies
    /// before the answer (1.15 to 1.22: "Fatal: unexpected error: Endpoint timeout").
    pub fn get(&self, endpoint: EndpointId, get: Get<'_>) -> Result<(), Status> {
        const CALL: &str = "ucp_get_nbx";
        let Get {
            local,
            offset,
            len,
            remote,
            rkey,
            token,
        } = get;
        let key = &rkey.key;
        let is_of_endpoint = key.endpoint == endpoint;
        let endpoint = self.inner.endpoint(endpoint, CALL)?;
        let ep = endpoint.usable(CALL)?;
        let handle = key.handle.get().filter(|_| is_of_endpoint);
        let rkey = handle.ok_or(Status::new(sys::UCS_ERR_INVALID_PARAM, CALL))?;
        if local.buffer().writable_range(offset, len).is_none() {
            return Err(Status::new(sys::UCS_ERR_OUT_OF_RANGE, CALL));
        }
        let (start, attributes) = self.inner.local(local, offset, len, CALL)?;
        let _current = self.inner.enter();
        if len == 0 {
            request::complete_empty(&self.inner, &endpoint, (token, CALL));
            return Ok(());
        }
        let keep = Keep::Get {
            _memory: Arc::clone(local),
            _key: KeyUse::new(key),
            _write: Write::new(&self.inner.state),
        };
        let api = self.inner.api();
        request::post(
            &self.inner,
            &endpoint,
            (token, CALL),
            keep,
            &attributes,
            |param| {
                // SAFETY: endpoint open, key live and of this endpoint, local range in bounds;
                // memory and key are held by the operation until the callback.
                let get =
                    || unsafe { (api.ucp_get_nbx)(ep, start, len, remote, rkey.as_ptr(), param) };
                may_unmap(self.inner.uses_gpu(), get)
            },
        )
    }

    /// The transport of the lane that a get by `key` from CUDA memory at `remote` into CUDA memory of ours, of these domains
    /// and this kind, goes over. With none, UCX would serve it in software.
    ///
    /// For `cuda_ipc` only a mapping of the peer's memory proves it: UCX also unpacks a key whose memory cannot be opened
    /// here. UCX reports the mapping since it has `ucp_rkey_ptr` for it (1.22).
    pub fn reaches<'a>(
        &self,
        lanes: &'a [Lane],
        (here, to): (Domains, MemoryKind),
        key: &RemoteKey,
        remote: u64,
    ) -> Option<&'a str> {
        self.inner.note_use(to);
        let is_mapped = may_unmap(true, || self.mapping(key, remote).is_some());
        let lane = direct_lane(lanes, here, key.domains, is_mapped);
        lane.map(|lane| &lane.transport[..])
    }

    /// The address here of a peer's memory that is mapped, or can be. The caller has the lock of [`may_unmap`].
    pub(crate) fn mapping(&self, key: &RemoteKey, remote: u64) -> Option<*mut c_void> {
        let handle = key.key.handle.get()?;
        let _current = self.inner.enter();
        let mut address = null_mut();
        let api = self.inner.api();
        // SAFETY: the key is live, on its thread, and `address` is a valid place.
        let code = unsafe { (api.ucp_rkey_ptr)(handle.as_ptr(), remote, &raw mut address) };
        (code == sys::UCS_OK).then_some(address)
    }

    /// Makes a key that a peer packed usable on the endpoint to that peer, for reads into memory of kind `local`.
    ///
    /// UCX parses it with few checks: take it from authenticated peers only.
    ///
    /// # Errors
    /// `UCS_ERR_INVALID_PARAM` for bytes that cannot be a key, `UCS_ERR_NOT_CONNECTED` or the
    /// endpoint's failure, else the status of UCX.
    pub fn unpack_rkey(
        &self,
        endpoint: EndpointId,
        packed: &[u8],
        local: MemoryKind,
    ) -> Result<RemoteKey, Status> {
        const CALL: &str = "ucp_ep_rkey_unpack";
        let endpoint = self.inner.endpoint(endpoint, CALL)?;
        let ep = endpoint.usable(CALL)?;
        if !is_plausible(packed) {
            return Err(Status::new(sys::UCS_ERR_INVALID_PARAM, CALL));
        }
        self.inner.note_use(local);
        let _current = self.inner.enter();
        let padded = [packed, &KEY_TAIL].concat();
        let mut handle = null_mut();
        let api = self.inner.api();
        // SAFETY: the endpoint is open; the bytes have a tail as long as any key that the map in
        // their head can announce, so UCX, which is not told a length, reads no further.
        let unpack =
            || unsafe { (api.ucp_ep_rkey_unpack)(ep, padded.as_ptr().cast(), &raw mut handle) };
        let code = may_unmap(self.inner.uses_gpu(), unpack);
        check(code, CALL)?;
        let handle = NonNull::new(handle).ok_or(Status::new(sys::UCS_ERR_NO_MEMORY, CALL))?;
        let key = Rc::new(Key {
            handle: Cell::new(Some(handle)),
            endpoint: endpoint.id,
            worker: Rc::clone(&self.inner),
            uses: Cell::new(0),
            is_revoked: Cell::new(false),
        });
        let keys = &self.inner.state.keys;
        keys.set(keys.get() + 1);
        endpoint.adopt_key(&key);
        let domains = Domains::of(packed);
        Ok(RemoteKey { key, domains })
    }
}

/// A key may hold one entry of at most 255 bytes for each of 64 memory domains.
const KEY_TAIL: [u8; 64 * 256] = [0; 64 * 256];

/// True if the head of a packed key can be one: a map of memory domains (8 bytes), the memory type (1 byte, which UCX
/// uses as an index), then per domain a length and that many bytes.
fn is_plausible(packed: &[u8]) -> bool {
    let Some((domains, rest)) = packed.split_first_chunk::<8>() else {
        return false;
    };
    let Some((&memory_type, mut entries)) = rest.split_first() else {
        return false;
    };
    if !(sys::UCS_MEMORY_TYPE_HOST..=sys::UCS_MEMORY_TYPE_CUDA_MANAGED)
        .contains(&memory_type.into())
    {
        return false;
    }
    for _ in 0..u64::from_le_bytes(*domains).count_ones() {
        let entry = entries
            .split_first()
            .and_then(|(&len, rest)| rest.get(len.into()..));
        let Some(rest) = entry else { return false };
        entries = rest;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of UCX 1.22 on one machine with a GPU and an RDMA device: the key's domains at the peer, the lane's both.
    fn lane(transport: &str, domains: (u32, u32)) -> Lane {
        Lane {
            transport: transport.to_owned(),
            device: "any".to_owned(),
            is_rma: true,
            domain: Some(domains.0),
            remote_domain: Some(domains.1),
        }
    }

    #[test]
    fn cuda_memory_is_read_over_cuda_ipc_only_when_it_is_mapped_here() {
        let (lane, there) = (lane("cuda_ipc", (7, 5)), Domains(1 << 5));
        let here = Domains::default();
        assert!(is_direct(&lane, here, there, true));
        assert!(!is_direct(&lane, here, there, false));
        assert!(!is_direct(&lane, here, Domains(1 << 7), true));
    }

    #[test]
    fn cuda_memory_is_read_over_rdma_only_when_both_ends_are_registered_for_it() {
        let (lane, here, there) = (lane("rc_mlx5", (2, 3)), Domains(1 << 2), Domains(1 << 3));
        assert!(is_direct(&lane, here, there, false));
        assert!(!is_direct(&lane, Domains(1 << 3), there, false));
        assert!(!is_direct(&lane, here, Domains(1 << 2), false));
    }

    #[test]
    fn mapped_memory_is_read_over_cuda_ipc_although_an_earlier_lane_reaches_it_too() {
        let lanes = [lane("rc_mlx5", (2, 3)), lane("cuda_ipc", (7, 5))];
        let (here, there) = (Domains(1 << 2), Domains(1 << 3 | 1 << 5));
        let over =
            |is_mapped| direct_lane(&lanes, here, there, is_mapped).map(|lane| &lane.transport[..]);
        assert_eq!(over(true), Some("cuda_ipc"));
        assert_eq!(over(false), Some("rc_mlx5"));
    }

    #[test]
    fn cuda_memory_is_never_read_over_lanes_of_the_host() {
        for transport in ["tcp", "cma", "posix", "sysv", "self", "cuda_copy"] {
            let (all, lane) = (Domains(u64::MAX), lane(transport, (1, 1)));
            assert!(!is_direct(&lane, all, all, true), "{transport}");
        }
    }

    #[test]
    fn domains_are_the_head_of_a_key() {
        let key = [0b100_1000, 0, 0, 0, 0, 0, 0, 0, 1];
        let domains = Domains::of(&key);
        assert!(domains.has(Some(3)) && domains.has(Some(6)));
        assert!(!domains.has(Some(2)) && !domains.has(Some(64)) && !domains.has(None));
        assert_eq!(Domains::of(&key[..7]), Domains::default());
    }

    #[test]
    fn truncated_and_foreign_keys_are_refused() {
        // A key packed by UCX 1.22 for host memory over tcp, sysv, posix and cma.
        let key = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff];
        assert!(is_plausible(&key));
        assert!((0..9).all(|len| !is_plausible(&key[..len])));
        assert!(!is_plausible(&[0xff; 64]));
        assert!(!is_plausible(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 4, 1, 2, 3]));
    }
}
