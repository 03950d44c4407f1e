//! Sockets and descriptors, as the kernel lists them.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const LISTEN: &str = "0A";

/// Addresses at which this process listens, over IPv4 and IPv6.
pub fn listening() -> HashSet<SocketAddr> {
    let own = own_inodes();
    ["/proc/self/net/tcp", "/proc/self/net/tcp6"]
        .iter()
        .filter_map(|table| std::fs::read_to_string(table).ok())
        .flat_map(|table| table.lines().filter_map(parse).collect::<Vec<_>>())
        .filter(|(_, inode)| own.contains(inode))
        .map(|(address, _)| address)
        .collect()
}

/// Open descriptors of this process.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .expect("descriptors")
        .count()
}

/// Connections to an address of 127.0.0.1, whether they were accepted or not.
pub fn num_connections(address: SocketAddr) -> usize {
    let remote = format!("0100007F:{:04X}", address.port());
    let table = std::fs::read_to_string("/proc/self/net/tcp").expect("the kernel's table");
    let is_one = |row: &&str| {
        let columns: Vec<&str> = row.split_whitespace().collect();
        columns.get(2) == Some(&remote.as_str()) && columns.get(3) == Some(&"01")
    };
    table.lines().filter(is_one).count()
}

fn own_inodes() -> HashSet<String> {
    let open = std::fs::read_dir("/proc/self/fd").expect("descriptors");
    let targets = open
        .flatten()
        .filter_map(|fd| std::fs::read_link(fd.path()).ok());
    targets
        .filter_map(|target| {
            let name = target.to_str()?.strip_prefix("socket:[")?;
            Some(name.strip_suffix(']')?.to_owned())
        })
        .collect()
}

/// Address and inode of a row, if it is of a socket that listens.
fn parse(row: &str) -> Option<(SocketAddr, String)> {
    let columns: Vec<&str> = row.split_whitespace().collect();
    let (address, state, inode) = (columns.get(1)?, columns.get(3)?, columns.get(9)?);
    let (ip, port) = address.split_once(':')?;
    let address = SocketAddr::new(parse_ip(ip)?, u16::from_str_radix(port, 16).ok()?);
    (*state == LISTEN).then(|| (address, (*inode).to_owned()))
}

/// The kernel prints words of 32 bits in the byte order of the machine.
fn parse_ip(text: &str) -> Option<IpAddr> {
    let word = |at: usize| u32::from_str_radix(text.get(at..at + 8)?, 16).ok();
    if text.len() == 8 {
        return Some(Ipv4Addr::from(word(0)?.to_ne_bytes()).into());
    }
    let mut bytes = [0; 16];
    for (i, part) in bytes.chunks_exact_mut(4).enumerate() {
        part.copy_from_slice(&word(8 * i)?.to_ne_bytes());
    }
    let ip = Ipv6Addr::from(bytes);
    Some(ip.to_ipv4_mapped().map_or(ip.into(), IpAddr::from))
}
