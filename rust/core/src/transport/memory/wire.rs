//! The messages that the workers of a test's thread send each other.

use std::cell::RefCell;

/// Gets the header and the body of a message.
type Tap = Box<dyn FnMut(&[u8], &mut [u8])>;

thread_local! {
    static TAP: RefCell<Option<Tap>> = const { RefCell::new(None) };
}

/// Gives `tap` each message that leaves a worker of this thread from now on. It may change the body.
pub(crate) fn tap(tap: impl FnMut(&[u8], &mut [u8]) + 'static) {
    TAP.set(Some(Box::new(tap)));
}

/// A message leaves with this body; the one that arrives.
pub(super) fn pass(header: &[u8], mut body: Vec<u8>) -> Vec<u8> {
    TAP.with_borrow_mut(|tap| {
        if let Some(tap) = tap {
            tap(header, &mut body);
        }
    });
    body
}
