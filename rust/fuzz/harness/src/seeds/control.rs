//! Seeds of a control port.

use super::goodbye;
use crate::control::{HANDOFFS, opening, sequence_state, user};
use crate::script::{ENCRYPTED, SERVER, Script};
use crate::wire;

pub(super) fn control() -> Vec<Vec<u8>> {
    let frames = wire::control(HANDOFFS[0], &opening(), &sequence_state());
    let all = |script| {
        let frames = frames.iter();
        frames.fold(script, |script: Script, frame| script.bare(frame))
    };
    let each = frames.iter().map(|frame| {
        let script = Script::new(0).user(user::OPEN, 0).bare(frame);
        script.user(user::FINISH, 0).finish()
    });
    let opened = |script: Script| script.user(user::EXPECT, 0).user(user::OPEN, 0);
    let finished = opened(Script::new(0)).user(user::FINISH, 0);
    let finished = all(finished.user(user::SET_RESULT, 0));
    let progressing = all(opened(Script::new(0))).user(user::PROGRESS, 0);
    let sealed = all(opened(Script::new(ENCRYPTED)).user(user::FINISH, 0));
    let sealed_watching = all(Script::new(ENCRYPTED | SERVER).user(user::WATCH, 0));
    let watching = Script::new(SERVER)
        .user(user::WATCH, 0)
        .user(user::RELEASE, 0)
        .user(user::SUBSCRIBE, 9)
        .user(user::QUERY_PROGRESS, 0);
    let unwatched = all(watching).user(user::UNWATCH, 2);
    each.chain([
        goodbye(finished),
        goodbye(sealed),
        goodbye(sealed_watching),
        goodbye(progressing.user(user::FINISH, 0)),
        goodbye(unwatched.user(user::WITHDRAW, 0)),
    ])
    .collect()
}
