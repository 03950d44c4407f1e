use super::*;

#[test]
fn a_wait_ends_when_another_thread_completes() {
    let (work, completer) = work();
    let thread = std::thread::spawn(move || completer.complete(Ok(7)));
    assert_eq!(work.wait_for(Duration::from_secs(5)), Ok(7));
    thread.join().unwrap();
}

#[test]
fn a_wait_ends_at_its_deadline() {
    let (work, _completer) = work::<()>();
    let deadline = Instant::now() + Duration::from_millis(20);
    assert_eq!(work.wait(Some(deadline)), Ok(Waited::TimedOut));
}

#[test]
fn a_work_that_is_completed_early_is_settled_later_and_keeps_its_result() {
    let (work, completer) = work();
    let late = Error::Timeout("late".to_owned());
    let soon = || Some(Instant::now() + Duration::from_millis(20));
    completer.complete_unsettled(Err(late.clone()));
    assert_eq!(work.wait(None), Ok(Waited::Done));
    assert_eq!(work.wait_settled(soon()), Ok(Waited::TimedOut));
    let waiting = work.clone();
    let thread = std::thread::spawn(
        move || {
            while waiting.wait_settled(None) != Ok(Waited::Done) {}
        },
    );
    completer.complete(Ok(7));
    thread.join().unwrap();
    assert_eq!(work.result(), Some(Err(late)));
}

#[test]
fn a_dropped_completer_ends_the_work_as_closed() {
    let (work, completer) = work::<()>();
    drop(completer);
    assert!(matches!(work.result(), Some(Err(Error::Closed(_)))));
}

fn completions() -> Arc<Completions> {
    Arc::new(Completions::new().unwrap())
}

fn is_readable(completions: &Completions) -> bool {
    let mut polled = [PollFd::new(completions, PollFlags::IN)];
    rustix::event::poll(&mut polled, Some(&Timespec::default())).unwrap() == 1
}

#[test]
fn one_descriptor_is_readable_while_completed_works_are_to_be_drained() {
    let completions = completions();
    let (works, completers): (Vec<_>, Vec<_>) = (0..100).map(|_| work::<()>()).unzip();
    for (key, work) in (0..).zip(&works) {
        assert!(work.watch(&completions, key));
    }
    assert!(!is_readable(&completions));
    for completer in completers {
        completer.complete(Ok(()));
        assert!(is_readable(&completions));
    }
    assert_eq!(completions.drain(), (0..100).collect::<Vec<u64>>());
    assert!(!is_readable(&completions));
    assert!(!works[0].watch(&completions, 100), "it is completed");
}

#[test]
fn each_loop_that_watches_a_work_gets_its_own_key() {
    let (here, there) = (completions(), completions());
    let (work, completer) = work::<()>();
    assert!(work.watch(&here, 1));
    assert!(work.watch(&there, 2));
    drop(completer);
    assert_eq!((here.drain(), there.drain()), (vec![1], vec![2]));
}

#[test]
fn a_watch_that_is_ended_leaves_nothing_behind() {
    let (here, there) = (completions(), completions());
    let (work, completer) = work::<()>();
    for key in 0..10 {
        assert!(work.watch(&here, key) && work.watch(&there, key));
    }
    for key in 0..10 {
        work.unwatch(&here, key);
    }
    assert_eq!(lock(&work.shared.state).watchers.len(), 10);
    completer.complete(Ok(()));
    assert!(!is_readable(&here));
    assert_eq!(there.drain().len(), 10);
}

#[test]
fn a_work_keeps_no_loop_that_is_gone() {
    let completions = completions();
    let (work, completer) = work::<()>();
    assert!(work.watch(&completions, 1));
    let kept = Arc::downgrade(&completions);
    drop(completions);
    assert!(kept.upgrade().is_none());
    completer.complete(Ok(()));
}
