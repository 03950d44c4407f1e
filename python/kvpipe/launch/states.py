"""The state of each process, reported as one line when it changes."""

from collections.abc import Sequence

from kvpipe.launch.plan import Echo, Instance

# "ended with signal SIGKILL" and "healthy after 900 s" fit.
_STATE_WIDTH = 25
_URL_WIDTH = 22


class States:
    """Reports the states of processes in columns: name, state, address, control port, cores."""

    def __init__(self, processes: Sequence[Instance], report: Echo) -> None:
        """Reports nothing yet."""
        self._report = report
        self._name_width = max(len(process.name) for process in processes)
        self._states: dict[str, str] = {}

    def change(self, process: Instance, state: str) -> None:
        """Reports a process, unless its state is the one reported last."""
        if self._states.get(process.name) == state:
            return
        self._states[process.name] = state
        columns = [f"{process.name:<{self._name_width}}", f"{state:<{_STATE_WIDTH}}", f"{process.url:<{_URL_WIDTH}}"]
        if process.control is not None:
            columns.append(f"control {process.control}")
        if process.cores:
            columns.append(f"cores {','.join(map(str, process.cores))}")
        self._report("  ".join(columns).rstrip())
