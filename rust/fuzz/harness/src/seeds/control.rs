//! Seeds of a control port.

use super::{SERVER, goodbye};
use crate::control::{HANDOFFS, opening, sequence_state};
use crate::script::Script;
use crate::wire;

pub(super) fn control() -> Vec<Vec<u8>> {
    let frames = wire::control(HANDOFFS[0], &opening(), &sequence_state());
    let producing = Script::new(0).user(0, 0).user(1, 0).user(2, 0).user(5, 0);
    let watching = Script::new(SERVER)
        .user(6, 0)
        .user(7, 0)
        .user(10, 9)
        .user(11, 0);
    let one = |frame: &Vec<u8>| Script::new(0).user(1, 0).frame(frame).user(2, 0);
    let all = |script| {
        frames
            .iter()
            .fold(script, |script: Script, it| script.frame(it))
    };
    let alone = frames.iter().map(|frame| one(frame).finish());
    let ends = [
        goodbye(all(producing)),
        goodbye(
            all(Script::new(0).user(0, 0).user(1, 0))
                .user(9, 0)
                .user(2, 0),
        ),
        goodbye(all(watching).user(4, 2).user(3, 0)),
    ];
    alone.chain(ends).collect()
}
