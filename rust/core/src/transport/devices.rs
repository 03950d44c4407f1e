//! The network devices that UCX may use. `UCX_NET_DEVICES` of the user chooses the RDMA devices. Where UCX has TCP, the local
//! address chooses the interface, so that UCX listens on no other.

use std::net::IpAddr;

use crate::error::{Error, Result};

const VARIABLE: &str = "UCX_NET_DEVICES";
/// UCX aborts the process at a longer list.
const DEVICES_CAP: usize = 64;

/// The UCX devices for a local address: the RDMA devices, and with `has_tcp` the interface that has it. With TCP on
/// loopback that is all.
///
/// # Errors
/// `Config`: no interface has the address.
pub(super) fn devices(local: IpAddr, has_tcp: bool) -> Result<String> {
    if has_tcp && local.is_loopback() {
        return Ok("lo".to_owned());
    }
    let interfaces = if_addrs::get_if_addrs().map_err(|error| {
        Error::Unavailable(format!("cannot tell the interface of {local}: {error}"))
    })?;
    let mut devices = Vec::new();
    if has_tcp {
        devices.push(interface(&interfaces, local)?);
    }
    let users = std::env::var_os(VARIABLE);
    let users = users.as_ref().map(|list| list.to_string_lossy());
    let is_interface = |name: &str| interfaces.iter().any(|one| one.name == name);
    devices.extend(chosen(rdma_devices(), users.as_deref(), is_interface));
    devices.truncate(DEVICES_CAP);
    Ok(devices.join(","))
}

/// The name of the interface that has an address. Without one, UCX would listen on all.
fn interface(interfaces: &[if_addrs::Interface], local: IpAddr) -> Result<String> {
    let its = interfaces.iter().find(|interface| interface.ip() == local);
    its.map(|interface| interface.name.clone()).ok_or_else(|| {
        Error::Config(format!(
            "no interface has the address {local}, so that UCX cannot be kept to one: listen on an address of this machine"
        ))
    })
}

/// The first port of each RDMA device, by UCX's name.
fn rdma_devices() -> Vec<String> {
    let devices = std::fs::read_dir("/sys/class/infiniband");
    devices
        .into_iter()
        .flatten()
        .flatten()
        .map(|device| format!("{}:1", device.file_name().to_string_lossy()))
        .collect()
}

/// The RDMA devices that the user's list leaves, in UCX's notation (since 1.22 with `^` and ranges): all that it names but
/// interfaces. UCX itself reports unknown names.
fn chosen(
    rdma: Vec<String>,
    users: Option<&str>,
    is_interface: impl Fn(&str) -> bool,
) -> Vec<String> {
    let Some(users) = users.map(str::trim) else {
        return rdma;
    };
    if let Some(unwanted) = users.strip_prefix('^') {
        let unwanted = names(unwanted);
        let is_wanted = |device: &String| !unwanted.contains(device);
        return rdma.into_iter().filter(is_wanted).collect();
    }
    let named = names(users);
    if named.iter().any(|name| name == "all") {
        return rdma;
    }
    // A name with a bracket that is no range here may be a range of interfaces to UCX.
    let is_device = |name: &String| !is_interface(name) && !name.contains('[');
    named.into_iter().filter(is_device).collect()
}

fn names(list: &str) -> Vec<String> {
    let entries = list.split(',').map(str::trim);
    let entries = entries.filter(|entry| !entry.is_empty());
    entries
        .flat_map(|entry| in_range(entry).unwrap_or_else(|| vec![entry.to_owned()]))
        .collect()
}

/// The names that `prefix[first-last]suffix` stands for.
fn in_range(entry: &str) -> Option<Vec<String>> {
    let (prefix, rest) = entry.split_once('[')?;
    let (range, suffix) = rest.split_once(']')?;
    let (first, last) = range.split_once('-')?;
    let numbers = first.parse::<u32>().ok()?..=last.parse().ok()?;
    let names = numbers.map(|number| format!("{prefix}{number}{suffix}"));
    Some(names.take(DEVICES_CAP).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(users: Option<&str>) -> Vec<String> {
        let rdma = ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1"].map(str::to_owned);
        chosen(rdma.to_vec(), users, |name| {
            ["eth0", "eth1"].contains(&name)
        })
    }

    #[test]
    fn the_first_device_is_the_interface_that_has_the_address() {
        let interfaces = if_addrs::get_if_addrs().unwrap();
        for of in &interfaces {
            let devices = devices(of.ip(), true).unwrap();
            let first = devices.split(',').next().unwrap();
            let has_it = |one: &if_addrs::Interface| one.name == first && one.ip() == of.ip();
            assert!(interfaces.iter().any(has_it), "{} by {devices}", of.ip());
        }
    }

    #[test]
    fn an_address_of_no_interface_is_an_error_and_not_every_interface() {
        let elsewhere = "203.0.113.1".parse().unwrap();
        assert!(
            devices(elsewhere, false).is_ok(),
            "RDMA devices have no address"
        );
        let error = devices(elsewhere, true).unwrap_err();
        assert!(
            matches!(&error, Error::Config(text) if text.contains("203.0.113.1")),
            "{error}"
        );
    }

    #[test]
    fn without_a_list_of_the_user_all_rdma_devices_are_used() {
        let all = ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1"];
        assert_eq!(of(None), all);
        assert_eq!(of(Some("all")), all);
    }

    #[test]
    fn the_users_list_says_which_rdma_devices_are_used_and_which_of_their_ports() {
        assert_eq!(of(Some("mlx5_1:1")), ["mlx5_1:1"]);
        assert_eq!(of(Some("mlx5_2:2, mlx5_0:1,")), ["mlx5_2:2", "mlx5_0:1"]);
        assert_eq!(of(Some("mlx5_[0-1]:1")), ["mlx5_0:1", "mlx5_1:1"]);
        assert_eq!(of(Some("^mlx5_[1-2]:1")), ["mlx5_0:1"]);
    }

    #[test]
    fn an_interface_in_the_users_list_is_not_listened_on() {
        assert_eq!(of(Some("eth1,mlx5_0:1")), ["mlx5_0:1"]);
        assert!(of(Some("eth[0-1]")).is_empty());
        assert!(of(Some("eth[1]")).is_empty());
        assert!(of(Some("")).is_empty());
    }

    #[test]
    fn a_device_that_nobody_knows_is_left_to_ucx_to_complain_of() {
        assert_eq!(of(Some("mlx5_9:1")), ["mlx5_9:1"]);
    }

    #[test]
    fn a_range_names_no_more_devices_than_ucx_takes() {
        assert_eq!(of(Some("mlx5_[0-4294967295]:1")).len(), DEVICES_CAP);
    }
}
