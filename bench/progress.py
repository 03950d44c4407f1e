"""Progress of a benchmark."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

_BAR_WIDTH = 30
_LABEL_WIDTH = 40


class Progress:
    """Reports progress on stderr: a bar on a terminal, otherwise a line for each round."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._num_steps = self._done = 0

    def expect(self, num_steps: int) -> None:
        """Sets the number of steps."""
        self._num_steps, self._done = num_steps, 0

    def step(self, label: str) -> None:
        """Counts a step and shows its label."""
        self._done += 1
        if self._is_terminal:
            filled = _BAR_WIDTH * self._done // self._num_steps
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            self._stream.write(f"\r[{bar}] {self._done}/{self._num_steps} {label[:_LABEL_WIDTH]:<{_LABEL_WIDTH}}")
            self._stream.flush()

    def line(self, text: str) -> None:
        """Prints a line if there is no bar."""
        if not self._is_terminal:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def end(self) -> None:
        """Ends the line of the bar."""
        if self._is_terminal and self._done:
            self._stream.write("\n")
