//! Large tensors that are late while the other end answers PINGs: the receiver does one read in a long time.

use super::*;
use crate::session::SessionTimeouts;

/// More than the reads that are in flight at once.
const LONG: usize = 16 << 20;
/// It passes when as many reads are in flight as can be.
const TIMEOUT: Duration = Duration::from_millis(100);
/// Time between two reads: the reads in flight take longer than the grace period.
const READ_TIME: Duration = Duration::from_millis(200);

fn step(ends: &Ends) {
    clock::advance(READ_TIME);
    rest(&ends.sender);
    ends.receiver.round();
}

fn step_until(ends: &Ends, is_over: impl Fn() -> bool) {
    for _ in 0..1000 {
        if is_over() {
            return;
        }
        step(ends);
    }
    panic!("it is never over");
}

fn open() -> Ends {
    Ends::open(MemoryPath::RemoteRead)
}

fn filled(len: usize, byte: u8) -> Buffer {
    Buffer::from_vec(vec![byte; len])
}

fn is_filled(buffer: &Buffer, byte: u8) -> bool {
    let len = buffer.len();
    let held = checksum::of_shared(buffer.bytes(0, len).unwrap());
    held == checksum::of(&vec![byte; len])
}

fn assert_late<T: Clone + std::fmt::Debug>(work: &Work<T>) {
    let Some(Err(Error::Timeout(text))) = work.result() else {
        panic!("{:?}", work.result())
    };
    for part in [
        "may still",
        "until the work is settled",
        "the pipe is usable",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

/// A send that has failed, while its receiver may still read the memory; and its receive.
fn unsettled_send(ends: &Ends, content: &Buffer) -> (Work<()>, Work<Arc<Received>>) {
    let received = ends.receive(&Buffer::zeroed(LONG), None);
    let sent = ends.send(content, Some(TIMEOUT));
    rest(&ends.sender);
    ends.receiver.round();
    step_until(ends, || sent.is_completed());
    assert_late(&sent);
    assert!(!sent.is_settled(), "reads are under way");
    assert!(!received.is_completed());
    (sent, received)
}

#[test]
fn a_send_that_is_read_long_after_its_deadline_fails_alone_and_later_ones_arrive_in_order() {
    let ends = open();
    let content = filled(LONG, 1);
    let (sent, lost) = unsettled_send(&ends, &content);
    assert!(content.write(0, &vec![9; LONG])); // against the rules
    let tensors = [100, LEN, EAGER_CAP, LONG, 1, 8 * LEN, EAGER_CAP + 1];
    let later: Vec<_> = (1..)
        .zip(tensors)
        .map(|(number, len)| {
            let out = Buffer::zeroed(len);
            let received = ends.receive(&out, None);
            (number, ends.send(&filled(len, number), None), received, out)
        })
        .collect();
    step_until(&ends, || sent.is_settled());
    assert_late(&sent);
    ends.run_until(|| later.iter().all(|(_, sent, ..)| sent.is_settled()));
    let lost = lost.result().unwrap();
    assert!(matches!(lost, Err(Error::Timeout(_))), "{lost:?}");
    for (number, sent, received, out) in later {
        assert_eq!(sent.result(), Some(Ok(())));
        assert!(received.result().unwrap().is_ok());
        assert!(is_filled(&out, number), "tensor {number}");
    }
    ends.run_until(|| ends.sender.info().in_flight == 0);
    assert_eq!(ends.sender.info().num_tensors, 7);
    assert_eq!(ends.receiver.info().num_tensors, 7);
}

#[test]
fn a_receiver_that_falls_silent_after_a_late_send_is_lost_which_settles_the_send() {
    let ends = open();
    let (sent, _lost) = unsettled_send(&ends, &filled(LONG, 1));
    assert_eq!(ends.sender.info().state, "open");
    for _ in 0..SessionTimeouts::default().silence.as_secs() + 2 {
        clock::advance(Duration::from_secs(1));
        rest(&ends.sender);
    }
    assert!(sent.is_settled());
    assert_late(&sent);
    assert_eq!(ends.sender.info().state, "closed");
}

#[test]
fn closing_a_pipe_with_a_send_that_is_not_settled_waits_for_it_until_the_deadline_and_no_longer() {
    for is_in_time in [true, false] {
        let ends = open();
        let (sent, _lost) = unsettled_send(&ends, &filled(LONG, 1));
        let timeout = if is_in_time { 100 * TIMEOUT } else { TIMEOUT };
        let deadline = Deadline::after(Some(timeout));
        let closed = ends.sender.close(deadline).unwrap().unwrap();
        rest(&ends.sender);
        let is_past = deadline.meet_by.is_some_and(|at| at <= clock::now());
        assert!(is_past || !closed.is_completed());
        step_until(&ends, || closed.is_completed());
        assert_eq!(closed.result().unwrap().is_ok(), is_in_time);
        assert!(sent.is_settled());
    }
}

#[test]
fn a_receive_that_is_read_long_after_its_deadline_fails_alone_and_the_next_waits_for_its_reads() {
    let ends = open();
    let out = Buffer::zeroed(LONG);
    let (lost, sent) = (
        ends.send(&filled(LONG, 1), None),
        ends.send(&filled(LONG, 2), None),
    );
    let late = ends.receive(&out, Some(TIMEOUT));
    rest(&ends.sender);
    ends.receiver.round();
    step_until(&ends, || late.is_completed());
    assert_late(&late);
    assert!(!late.is_settled(), "reads are under way");
    assert!(!lost.is_completed() && !sent.is_completed());
    let received = ends.receive(&out, None);
    step_until(&ends, || received.is_completed());
    assert!(late.is_settled());
    assert_late(&late);
    assert!(received.result().unwrap().is_ok());
    assert!(is_filled(&out, 2), "a late read has written into it");
    ends.run_until(|| sent.is_completed());
    assert!(matches!(lost.result(), Some(Err(Error::Timeout(_)))));
    assert_eq!(sent.result(), Some(Ok(())));
    ends.check_usable();
}
