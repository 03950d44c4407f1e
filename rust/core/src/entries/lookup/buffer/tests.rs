use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use kvpipe_ucx::Buffer;

use super::*;
use crate::entries::items::key_of;
use crate::entries::lookup::tests::manual::entry;
use crate::tensor::{Meta, Received};
use crate::transport::MemoryPath;
use crate::work::Waited;

#[test]
fn a_buffer_in_a_fork_takes_no_lock_that_another_thread_may_hold() {
    const TIMEOUT: Duration = Duration::from_secs(20);
    let mut local = LookupBuffer::new(1 << 20);
    if let Origin::Local(shared) = &mut local.origin {
        Arc::get_mut(shared).unwrap().fork();
    }
    let local = Arc::new(local);
    let _serving = local.serving();
    let (sender, ended) = std::sync::mpsc::channel();
    let child = Arc::clone(&local);
    std::thread::spawn(move || {
        let transport = Transport::Memory(MemoryPath::RemoteRead);
        let served = child.serve("127.0.0.1:0", b"token", transport, true);
        let inserted = child.insert(vec![1], entry(Meta::default(), 1), None, Then::GoOn);
        child.close();
        let _ = sender.send((served, inserted.map(drop)));
    });
    let (served, inserted) = ended.recv_timeout(TIMEOUT).expect("no call blocks");
    assert!(matches!(served, Err(Error::Closed(_))));
    assert!(matches!(inserted, Err(Error::Closed(_))));
}

/// The owner of an insert's memory: notes whether the insert had completed when it was released.
#[derive(Clone, Default)]
struct Owner {
    insert: Arc<OnceLock<Operation<()>>>,
    was_completed: Arc<AtomicBool>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(insert) = self.insert.get() {
            let is_completed = insert.is_completed();
            self.was_completed.fetch_or(is_completed, Ordering::AcqRel);
        }
    }
}

#[test]
fn an_insert_that_fails_releases_its_callers_memory_before_it_completes() {
    let ends: [fn(&LookupBuffer, &Operation<()>); 2] = [
        |buffer, _| buffer.close(),
        |_, insert| assert_eq!(insert.wait(None).unwrap(), Waited::Done),
    ];
    for end in ends {
        let one = entry(Meta::default(), 90);
        let capacity = one.entry_bytes(key_of(&[1]).len());
        let buffer = LookupBuffer::new(capacity + 9);
        let first = buffer.insert(vec![1], one, None, Then::GoOn);
        assert!(first.unwrap().is_completed());
        let owner = Owner::default();
        let mut items = entry(Meta::default(), 90);
        items.0[0] = Arc::new(Received {
            meta: Meta::default(),
            buffer: Buffer::zeroed(9).first(9, Box::new(owner.clone())),
        });
        let timeout = Some(Duration::from_millis(5));
        let inserted = buffer.insert(vec![2], items, timeout, Then::GoOn);
        assert!(owner.insert.set(inserted.unwrap()).is_ok());
        let insert = owner.insert.get().unwrap();
        assert!(!insert.is_completed());
        end(&buffer, insert);
        assert!(insert.is_completed());
        assert!(!owner.was_completed.load(Ordering::Acquire));
    }
}
