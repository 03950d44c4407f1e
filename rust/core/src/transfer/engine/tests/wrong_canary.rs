//! Transfers of a session whose canary has come with other bytes.

use super::*;
use crate::logged::logged;

#[test]
fn after_a_wrong_canary_all_transfers_stream_and_the_log_has_one_line() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let lines = logged(|| {
        it.links.end_probe_with_other_bytes(SESSION);
        for owner in 0..100 {
            let id = it.begin(it.request(owner));
            assert_eq!(it.requests(), [(id, Wanted::ChecksummedBytes)]);
            it.data(id).unwrap();
            it.assert_moved(owner);
        }
    });
    let [line] = &lines[..] else {
        panic!("{lines:?}");
    };
    for part in ["session.stream peer=", "canary", "set KVPIPE_DATA_PATH=tcp"] {
        assert!(line.contains(part), "{line} lacks {part}");
    }
}
