//! The network devices that UCX may use: RDMA devices, which `UCX_NET_DEVICES` of the user chooses.

use crate::error::{Error, Result};

const VARIABLE: &str = "UCX_NET_DEVICES";
/// UCX aborts the process at a longer list.
const DEVICES_CAP: usize = 64;

/// The RDMA devices that the user leaves to UCX, in its notation.
///
/// # Errors
/// `Unavailable`: the system does not tell its interfaces, which the user's list may name.
pub(super) fn devices() -> Result<String> {
    let interfaces = if_addrs::get_if_addrs().map_err(|error| {
        Error::Unavailable(format!(
            "cannot tell the interfaces of this machine: {error}"
        ))
    })?;
    let users = std::env::var_os(VARIABLE);
    let users = users.as_ref().map(|list| list.to_string_lossy());
    let is_interface = |name: &str| interfaces.iter().any(|one| one.name == name);
    let mut devices = chosen(rdma_devices(), users.as_deref(), is_interface);
    devices.truncate(DEVICES_CAP);
    Ok(devices.join(","))
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
    fn an_unknown_device_is_left_to_ucx_to_report() {
        assert_eq!(of(Some("mlx5_9:1")), ["mlx5_9:1"]);
    }

    #[test]
    fn a_range_names_no_more_devices_than_ucx_takes() {
        assert_eq!(of(Some("mlx5_[0-4294967295]:1")).len(), DEVICES_CAP);
    }
}
