//! The transports that an endpoint uses. UCX has no call that reports the purpose of each lane, so that they are parsed
//! from the text that it prints, and compared with the names that `ucp_ep_query` reports.

use std::ffi::{CStr, c_char, c_uint};
use std::ptr::{null, null_mut};

use crate::endpoint::EndpointId;
use crate::status::Status;
use crate::sys;
use crate::worker::Worker;

/// Most lanes of an endpoint that UCX is asked for; UCX has up to 16.
const LANES_CAP: usize = 64;
/// Longest piece of what UCX printed that an error shows.
const SHOWN_CHARS: usize = 200;

/// One transport in use by an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// UCX's name, such as `tcp`, `cma`, `rc_mlx5`, `cuda_ipc`.
    pub transport: String,
    /// The device, such as `eth0`, `mlx5_0:1`, `memory`.
    pub device: String,
    /// True if remote memory access goes over it.
    pub is_rma: bool,
    /// Its memory domain here, by the number that it has in the keys of this process.
    pub domain: Option<u32>,
    /// Its memory domain at the peer, by the number that it has in the peer's keys.
    pub remote_domain: Option<u32>,
}

/// Reason for which the lanes of an endpoint are not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LanesError {
    /// The endpoint has failed or is closed.
    #[error("{0}")]
    Unusable(Status),
    /// UCX describes them in a way that kvpipe does not know.
    #[error("UCX describes its lanes in an unknown way: {0}")]
    Unreadable(String),
}

impl Worker {
    /// The endpoint's lanes. They can change until the first operation has completed.
    ///
    /// # Errors
    /// The endpoint cannot be used, or this UCX describes its lanes in an unknown way.
    pub fn lanes(&self, endpoint: EndpointId) -> Result<Vec<Lane>, LanesError> {
        const CALL: &str = "ucp_ep_print_info";
        let endpoint = self.inner.endpoint(endpoint, CALL);
        let handle = endpoint.and_then(|endpoint| endpoint.usable(CALL));
        let handle = handle.map_err(LanesError::Unusable)?;
        let api = self.inner.api();
        let text = capture(|stream| {
            // SAFETY: the endpoint is open, on its thread; the stream is open for writing.
            unsafe { (api.ucp_ep_print_info)(handle, stream) };
        });
        let lanes = parse(&text).map_err(LanesError::Unreadable)?;
        check(&lanes, &self.transports(handle)).map_err(LanesError::Unreadable)?;
        Ok(lanes)
    }

    /// The transport of each lane, as `ucp_ep_query` reports them: none before UCX 1.14.
    fn transports(&self, endpoint: *mut sys::ucp_ep) -> Vec<String> {
        let mut entries = [const {
            sys::ucp_transport_entry_t {
                transport_name: null(),
                device_name: null(),
            }
        }; LANES_CAP];
        let mut attr = sys::ucp_ep_attr_t {
            field_mask: sys::UCP_EP_ATTR_FIELD_TRANSPORTS,
            name: [0; 32],
            // SAFETY: all zeroes is an address of no family; UCX writes neither, because the mask does not name them.
            local_sockaddr: unsafe { std::mem::zeroed() },
            // SAFETY: as above.
            remote_sockaddr: unsafe { std::mem::zeroed() },
            transports: sys::ucp_transports_t {
                entries: entries.as_mut_ptr(),
                num_entries: LANES_CAP as c_uint,
                entry_size: size_of::<sys::ucp_transport_entry_t>(),
            },
            user_data: null_mut(),
        };
        let api = self.inner.api();
        // SAFETY: the endpoint is open, on its thread; the entries are as many as `num_entries` says, and outlive the call.
        let code = unsafe { (api.ucp_ep_query)(endpoint, &raw mut attr) };
        let known = entries.iter().map_while(|entry| {
            let name = (!entry.transport_name.is_null()).then_some(entry.transport_name)?;
            // SAFETY: UCX has put a name there that lives as long as the context.
            Some(
                unsafe { CStr::from_ptr(name) }
                    .to_string_lossy()
                    .into_owned(),
            )
        });
        if code == sys::UCS_OK {
            known.collect()
        } else {
            Vec::new()
        }
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

/// Reads the lines of the lanes among all that UCX prints of an endpoint. The error shows what is not understood.
fn parse(text: &str) -> Result<Vec<Lane>, String> {
    let mut lanes = Vec::new();
    for line in text.lines().filter(|line| line.contains("lane[")) {
        match parse_line(line) {
            Some((number, lane)) if number == lanes.len() => lanes.push(lane),
            _ => return Err(format!("{:?}", shown(line.trim()))),
        }
    }
    if lanes.is_empty() {
        return Err(format!("no lane in {:?}", shown(text.trim())));
    }
    Ok(lanes)
}

/// Checks that the lanes that were read are those that UCX reports by name, if it reports any.
fn check(lanes: &[Lane], transports: &[String]) -> Result<(), String> {
    let read = lanes.iter().map(|lane| &lane.transport);
    if transports.is_empty() || read.clone().eq(transports) {
        return Ok(());
    }
    let read: Vec<_> = read.collect();
    Err(format!(
        "ucp_ep_print_info names {read:?}, ucp_ep_query {transports:?}"
    ))
}

fn shown(text: &str) -> String {
    text.chars().take(SHOWN_CHARS).collect()
}

/// Reads one line such as
/// `#  lane[0]:  2:tcp/lo.0 md[1]  -> md[1]/tcp/sysdev[255] seg 8192 rma_bw#0 am keepalive wireup`
/// and its number.
fn parse_line(text: &str) -> Option<(usize, Lane)> {
    let (number, lane) = text.split_once("lane[")?.1.split_once("]:")?;
    let (here, there) = lane.split_once("->")?;
    let (_, resource) = here.split_whitespace().next()?.split_once(':')?;
    let (transport, device) = resource.split_once('/')?;
    let device = device
        .rsplit_once('.')
        .map_or(device, |(device, _path)| device);
    let is_use = |is_it: fn(&str) -> bool| there.split_whitespace().any(is_it);
    let lane = Lane {
        transport: transport.to_owned(),
        device: device.to_owned(),
        is_rma: is_use(|word| word == "rma" || word.starts_with("rma_bw")),
        domain: domain(here),
        remote_domain: domain(there),
    };
    let is_named = !lane.transport.is_empty() && !lane.device.is_empty();
    let has_domains = lane.domain.is_some() && lane.remote_domain.is_some();
    let number = number.parse().ok()?;
    (is_named && has_domains).then_some((number, lane))
}

/// The number in `md[4]`.
fn domain(text: &str) -> Option<u32> {
    let (number, _) = text.split_once("md[")?.1.split_once(']')?;
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(name: (&str, &str), is_rma: bool, domains: (u32, u32)) -> Lane {
        Lane {
            transport: name.0.to_owned(),
            device: name.1.to_owned(),
            is_rma,
            domain: Some(domains.0),
            remote_domain: Some(domains.1),
        }
    }

    #[test]
    fn lanes_of_each_ucx_from_1_13_to_1_23_are_read() {
        let ucx_1_13 = "#
# UCP endpoint
#
#               peer: <no debug data>
#                 lane[0]:  2:tcp/lo.0 md[1]                  -> md[1]/tcp/sysdev[255] rma_bw#0 am am_bw#0 wireup
#
#                tag_send: 0..<egr/short>..8185..<egr/zcopy>..(inf)";
        let tcp = lane(("tcp", "lo"), true, (1, 1));
        assert_eq!(parse(ucx_1_13), Ok(vec![tcp]));
        let ucx_1_18 = "#                 lane[0]:  1:rc_mlx5/mlx5_0:1.0 md[1]   -> md[1]/ib/sysdev[0] seg 8256 rma_bw#0 am am_bw#0 wireup";
        let rc = lane(("rc_mlx5", "mlx5_0:1"), true, (1, 1));
        assert_eq!(parse(ucx_1_18), Ok(vec![rc]));
        let ucx_1_22 = "#               peer: <no debug data>
#                 lane[0]:  2:tcp/lo.0 md[1]   -> md[1]/tcp/sysdev[255] seg 42 am keepalive wireup
#                 lane[1]:  5:cma/memory.0 md[4]   -> md[3]/cma/sysdev[255] seg 42 rma_bw#0
# |    Range    |    Description     |            Config             |";
        let ucx_1_22_lanes = vec![
            lane(("tcp", "lo"), false, (1, 1)),
            lane(("cma", "memory"), true, (4, 3)),
        ];
        assert_eq!(parse(ucx_1_22), Ok(ucx_1_22_lanes));
        let ucx_1_23 = "#                 lane[0]: 12:dc_mlx5/mlx5_3:1.0 md[11] -> addr[3].md[10]/ib/sysdev[7] seg 8256 rma_bw#0 device amo#0 am rma";
        let dc = lane(("dc_mlx5", "mlx5_3:1"), true, (11, 10));
        assert_eq!(parse(ucx_1_23), Ok(vec![dc]));
    }

    #[test]
    fn what_cannot_be_read_is_an_error_that_shows_it_and_never_a_guess() {
        let good = "lane[0]:  2:tcp/lo.0 md[1] -> md[1]/tcp/sysdev[255] am";
        for odd in [
            "",
            "nothing of the kind",
            "lane[",
            "lane[0]:",
            "lane[0]: <wireup>",
            "lane[0]: cm tcp",
            "lane[0]: 1:tcp md[0] -> md[0]/tcp/sysdev[1] am",
            "lane[0]: 1:/lo.0 md[0] -> md[0]/tcp/sysdev[1] am",
            "lane[0]: 1:tcp/lo.0 md[0] am",
            "lane[0]: 1:tcp/lo.0 md[x] -> md[0]/tcp/sysdev[1] am",
            "lane[1]: 1:tcp/lo.0 md[0] -> md[0]/tcp/sysdev[1] am",
            "lane[x]: 1:tcp/lo.0 md[0] -> md[0]/tcp/sysdev[1] am",
        ] {
            let error = parse(odd).unwrap_err();
            assert!(error.contains(odd), "{error} for {odd}");
            if odd.contains("lane[") {
                assert!(parse(&format!("{odd}\n{good}")).is_err(), "{odd}");
            }
        }
        assert!(parse(&format!("{good}\nlane[1]: <wireup>")).is_err());
        assert!(
            parse(&format!("{good}\n{good}")).is_err(),
            "one number twice"
        );
    }

    #[test]
    fn a_long_text_is_shown_in_part() {
        assert!(parse(&"x".repeat(5000)).unwrap_err().len() < 300);
    }

    #[test]
    fn lanes_that_ucx_names_otherwise_when_it_is_queried_are_an_error_that_shows_both() {
        let lanes = [
            lane(("tcp", "lo"), false, (1, 1)),
            lane(("cma", "memory"), true, (4, 3)),
        ];
        let names = |names: &[&str]| {
            names
                .iter()
                .map(|name| (*name).to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(check(&lanes, &names(&["tcp", "cma"])), Ok(()));
        assert_eq!(check(&lanes, &[]), Ok(()), "UCX 1.13 does not report them");
        for others in [&["tcp"][..], &["tcp", "xpmem"], &["tcp", "cma", "cma"]] {
            let error = check(&lanes, &names(others)).unwrap_err();
            assert!(
                error.contains("cma") && error.contains(others[others.len() - 1]),
                "{error}"
            );
        }
    }
}
