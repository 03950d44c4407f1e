//! The messages that the reactors of a test's thread send.

use std::cell::RefCell;

/// Gets the header and the body of a message.
type Tap = Box<dyn FnMut(&mut [u8], &mut [u8])>;

thread_local! {
    static TAP: RefCell<Option<Tap>> = const { RefCell::new(None) };
}

/// Gives `tap` each message that a reactor of this thread sends from now on. It may change both.
pub(crate) fn tap(tap: impl FnMut(&mut [u8], &mut [u8]) + 'static) {
    TAP.set(Some(Box::new(tap)));
}

/// True if there is a tap.
pub(super) fn is_tapped() -> bool {
    TAP.with_borrow(Option::is_some)
}

/// A message leaves with this header and this body; those that arrive.
pub(super) fn pass(header: &[u8], body: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (mut header, mut body) = (header.to_vec(), body.to_vec());
    TAP.with_borrow_mut(|tap| {
        if let Some(tap) = tap {
            tap(&mut header, &mut body);
        }
    });
    (header, body)
}
