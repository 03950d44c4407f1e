//! A session as others than its two sides see it.

use kvpipe_core::net::identity::SessionKind;

use crate::agents::agent;
use crate::common::relay::Relay;
use crate::common::{Raw, alone};

#[test]
fn the_handshake_shows_no_identity_to_who_reads_the_network() {
    alone(|search| {
        let agent = agent(search);
        let relay = Relay::to(agent.address().expect("address"));
        let _raw = Raw::begin(relay.address, SessionKind::Agent);
        let said = [relay.client_said(), relay.server_said()].concat();
        let shows = |part: &[u8]| said.windows(part.len()).any(|window| window == part);
        assert!(shows(b"KVPP"), "{} bytes", said.len());
        let boot_id = std::fs::read("/proc/sys/kernel/random/boot_id").expect("boot id");
        assert!(!shows(boot_id.trim_ascii()));
    });
}
