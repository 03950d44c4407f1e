"""What blocks are read into or written to, the same in every program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .request import LOCAL, REMOTE, pattern
from .side import expect

if TYPE_CHECKING:
    from .request import Task


def verify_blocks(room: Any, task: Task, *, swap: bool = False) -> None:
    """Raises unless the blocks of the run are in the room.

    Args:
        room: Bytes.
        task: The run.
        swap: The room is what the active side calls remote.
    """
    total, size = len(room), task.num_bytes
    places = total // size
    here, there = (data[: places * size].reshape(-1, size) for data in (room, pattern(total)))
    local, remote = task.transfers(total, LOCAL), task.transfers(total, REMOTE)
    if swap:
        local, remote = remote, local
    for i in task.chosen(total):
        expect(here[local[i]], there[remote[i]], "blocks")
