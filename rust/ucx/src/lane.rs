//! The transports that an endpoint uses. UCX has no call that reports the purpose of each lane, so
//! that they are parsed from the text that it prints.

use std::ffi::c_char;
use std::ptr::null_mut;

use crate::endpoint::EndpointId;
use crate::worker::Worker;

/// One transport in use by an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// UCX's name, such as `tcp`, `cma`, `rc_mlx5`, `cuda_ipc`.
    pub transport: String,
    /// The device, such as `eth0`, `mlx5_0:1`, `memory`.
    pub device: String,
    /// Whether remote memory access goes over it.
    pub is_rma: bool,
    /// Whether active messages go over it.
    pub is_am: bool,
    /// Its memory domain here, by the number that it has in the keys of this process.
    pub domain: Option<u32>,
    /// Its memory domain at the peer, by the number that it has in the peer's keys.
    pub remote_domain: Option<u32>,
}

impl Worker {
    /// The endpoint's lanes, as far as UCX reports them: none for an endpoint that has failed or is closed.
    /// They can change until the first operation has completed.
    pub fn lanes(&self, endpoint: EndpointId) -> Vec<Lane> {
        const CALL: &str = "ucp_ep_print_info";
        let endpoint = self.inner.endpoint(endpoint, CALL);
        let Ok(handle) = endpoint.and_then(|endpoint| endpoint.usable(CALL)) else {
            return Vec::new();
        };
        let api = self.inner.api();
        let text = capture(|stream| {
            // SAFETY: the endpoint is open, on its thread; the stream is open for writing.
            unsafe { (api.ucp_ep_print_info)(handle, stream) };
        });
        text.lines().filter_map(parse).collect()
    }
}

/// The text that `print` writes to a stream; empty when the system has no memory for one.
fn capture(print: impl FnOnce(*mut libc::FILE)) -> String {
    let (mut text, mut len): (*mut c_char, usize) = (null_mut(), 0);
    // SAFETY: both places outlive the stream, which is closed below.
    let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut len) };
    if stream.is_null() {
        return String::new();
    }
    print(stream);
    // SAFETY: opened above, closed once; this brings `text` and `len` up to date.
    let closed = unsafe { libc::fclose(stream) };
    if text.is_null() {
        return String::new();
    }
    let len = if closed == 0 { len } else { 0 };
    // SAFETY: the closed stream left `len` initialised bytes at `text`.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), len) };
    let copy = String::from_utf8_lossy(bytes).into_owned();
    // SAFETY: open_memstream's buffer is the caller's to free, and is not used afterwards.
    unsafe { libc::free(text.cast()) };
    copy
}

/// Reads one line such as
/// `#  lane[0]:  2:tcp/lo.0 md[1]  -> md[1]/tcp/sysdev[255] seg 8192 rma_bw#0 am keepalive wireup`
fn parse(text: &str) -> Option<Lane> {
    let (_, lane) = text.split_once("lane[")?;
    let mut words = lane.split_once("]:")?.1.split_whitespace();
    let (_, resource) = words.next()?.split_once(':')?;
    let (transport, device) = resource.split_once('/')?;
    let device = device
        .rsplit_once('.')
        .map_or(device, |(device, _path)| device);
    let uses: Vec<&str> = words.collect();
    let (here, there) = lane.split_once("->").unwrap_or((lane, ""));
    Some(Lane {
        transport: transport.to_owned(),
        device: device.to_owned(),
        is_rma: uses
            .iter()
            .any(|word| *word == "rma" || word.starts_with("rma_bw")),
        is_am: uses.contains(&"am"),
        domain: domain(here),
        remote_domain: domain(there),
    })
}

/// The number in `md[4]`.
fn domain(text: &str) -> Option<u32> {
    let (number, _) = text.split_once("md[")?.1.split_once(']')?;
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(name: (&str, &str), is_rma: bool, is_am: bool, domains: (u32, u32)) -> Lane {
        Lane {
            transport: name.0.to_owned(),
            device: name.1.to_owned(),
            is_rma,
            is_am,
            domain: Some(domains.0),
            remote_domain: Some(domains.1),
        }
    }

    #[test]
    fn lanes_of_ucx_1_22_and_1_13_are_read() {
        let text = "#               peer: <no debug data>
#                 lane[0]:  2:tcp/lo.0 md[1]   -> md[1]/tcp/sysdev[255] seg 42 am keepalive wireup
#                 lane[1]:  5:cma/memory.0 md[4]   -> md[3]/cma/sysdev[255] seg 42 rma_bw#0
#                 lane[2]:  1:rc_mlx5/mlx5_0:1.0 md[1]   -> md[1]/ib/sysdev[0] rma am am_bw#0
# |    Range    |    Description     |            Config             |";
        let lanes: Vec<Lane> = text.lines().filter_map(parse).collect();
        let expected = [
            lane(("tcp", "lo"), false, true, (1, 1)),
            lane(("cma", "memory"), true, false, (4, 3)),
            lane(("rc_mlx5", "mlx5_0:1"), true, true, (1, 1)),
        ];
        assert_eq!(lanes, expected);
    }

    #[test]
    fn odd_lines_are_skipped() {
        for line in [
            "",
            "lane[",
            "lane[0]:",
            "lane[0]: <wireup>",
            "lane[0]: 1:tcp md[0]",
        ] {
            assert_eq!(parse(line), None, "{line}");
        }
    }
}
