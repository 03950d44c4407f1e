//! The messages that the workers of a test's thread send each other.

use std::cell::RefCell;

/// Gets the header and the body of a message.
type Tap = Box<dyn FnMut(&mut [u8], &mut [u8])>;

thread_local! {
    static TAP: RefCell<Option<Tap>> = const { RefCell::new(None) };
}

/// Gives `tap` each message that leaves a worker of this thread from now on. It may change both.
pub(crate) fn tap(tap: impl FnMut(&mut [u8], &mut [u8]) + 'static) {
    TAP.set(Some(Box::new(tap)));
}

/// A message leaves with this header and this body; those that arrive.
pub(super) fn pass(mut header: Vec<u8>, mut body: Vec<u8>) -> (Vec<u8>, Vec<u8>) {
    TAP.with_borrow_mut(|tap| {
        if let Some(tap) = tap {
            tap(&mut header, &mut body);
        }
    });
    (header, body)
}
