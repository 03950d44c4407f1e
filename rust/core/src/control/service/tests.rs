use std::time::Duration;

use super::*;
use crate::link::Timing;

#[test]
fn an_address_whose_link_has_failed_is_connected_to_again() {
    let patience = Patience {
        timing: Timing::default(),
        lease: Duration::ZERO,
        open: Duration::ZERO,
        handoff: Duration::ZERO,
    };
    let (mut io, mut schedulers) = (
        Io::alone(None),
        Schedulers::new(Events::default(), patience),
    );
    let link = schedulers.link_to(&mut io, "127.0.0.1:9");
    assert_eq!(schedulers.link_to(&mut io, "127.0.0.1:9"), link);
    let lost = Error::lost("127.0.0.1:9", "connection closed");
    io.fail(link, lost.clone());
    let again = schedulers.link_to(&mut io, "127.0.0.1:9");
    assert_ne!(again, link);
    schedulers.link_down(&mut io, link, lost);
    assert_eq!(schedulers.link_to(&mut io, "127.0.0.1:9"), again);
}
