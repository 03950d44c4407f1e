"""A RabbitMQ broker of one's own: a process with its data in a folder, on free ports of loopback."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from bench.processes import SubjectError
from kvpipe.launch.ports import free_ports
from kvpipe.launch.process import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpipe.launch.watchdog import Watchdog

_HOST = "127.0.0.1"
_STARTED = b"completed with"
# A start takes 9 s on an idle machine with two cores, and was seen to take more than 60 beside three lanes of tests.
_START_WITHIN_S, _END_WITHIN_S, _CALL_WITHIN_S = 300.0, 60.0, 30.0
_TAIL_CHARACTERS = 2000
# What Debian installs in front of the server's script; it wants to be root, and drops the environment.
_DEBIAN_WRAPPER = "rabbitmq-script-wrapper"
# No epmd, which would outlive the broker: the node listens on a port that is known. RabbitMQ starts one unless the node
# has its name already.
_ERLANG_ARGUMENTS = (
    "-noinput -start_epmd false -erl_epmd_port {port} -kernel inet_dist_use_interface {{127,0,0,1}} -sname {node}"
)
# Asks the queue itself: what the broker keeps of a quorum queue is seconds old. To a classic queue `stat` is a use, and
# puts off its end.
_NUM_READY = """case amqqueue:get_type(Queue) of
    rabbit_classic_queue -> [{messages_ready, Num}] = rabbit_amqqueue:info(Queue, [messages_ready]), Num;
    _ -> element(2, rabbit_amqqueue:stat(Queue))
end"""
# A queue that ends meanwhile is left out.
_ROW = f"""try [[element(4, amqqueue:get_name(Queue)), {_NUM_READY}]]
catch exit:{{Why, _}} when Why == normal; Why == noproc -> []
end"""
_QUEUES = f"binary_to_list(rabbit_json:encode([Row || Queue <- rabbit_amqqueue:list(), Row <- {_ROW}]))"


def missing() -> str:
    """Why there can be no broker; empty if there can be one."""
    programs = [name for name in ("rabbitmq-server", "erl_call") if shutil.which(name) is None]
    return f"{' and '.join(programs)} not found: run scripts/servers" if programs else ""


class BrokerProcess:
    """A broker with no plugins, whose user is `guest`. Calls block; the ports stay the same in its next life.

    Args:
        folder: Folder of its data, configuration and log.
        erlang_arguments: More arguments of the Erlang machine.
        watchdog: Ends it if this process dies.

    Attributes:
        url: AMQP URL.
    """

    def __init__(self, folder: Path, erlang_arguments: str = "", *, watchdog: Watchdog | None = None) -> None:
        self._folder = folder
        self._erlang_arguments = erlang_arguments
        self._watchdog = watchdog
        self._port, self._node_port = free_ports(2)
        self._node = f"kvpipe-{self._port}@localhost"
        self.url = f"amqp://guest:guest@{_HOST}:{self._port}/"
        self._process: ProcessGroup | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Process id of the Erlang machine, and of its process group."""
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """True if it was started, and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What it has logged in all its lives."""
        return (self._folder / "log").read_text(errors="replace")

    def start(self) -> None:
        """Starts it with the data that is there, and returns when it accepts connections.

        Raises:
            SubjectError: It is not installed, has ended, or takes too long.
        """
        if reason := missing():
            raise SubjectError(reason)
        self._process = ProcessGroup(
            [_server_script()],
            watchdog=self._watchdog,
            stdout=subprocess.PIPE,
            env={**os.environ, **self._environment()},
            cwd=self._folder,
        )
        self._until_started(self._process)

    def kill(self) -> None:
        """Ends it at once, as a crash does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ends it in order: it closes connections and writes its data.

        As `kill`, it returns when its processes have ended. A shell that Erlang runs at that moment ends by itself.
        """
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Ends it in order and starts it again."""
        self.stop()
        self.start()

    def queues(self) -> dict[str, int]:
        """How many messages are ready in each queue.

        Raises:
            SubjectError: The node does not answer.
        """
        return dict(json.loads(self.call(_QUEUES)[1:-1]))

    def call(self, expression: str) -> str:
        """Evaluates an Erlang expression on the node and returns its value as text.

        Raises:
            SubjectError: The node does not answer.
        """
        done = subprocess.run(  # noqa: S603 - as `missing` has found it
            ["erl_call", "-address", f"{_HOST}:{self._node_port}", "-e"],  # noqa: S607
            input=f"{expression}.\n".encode(),
            env={**os.environ, "HOME": str(self._folder)},  # where the node has left its cookie
            capture_output=True,
            timeout=_CALL_WITHIN_S,
            check=False,
        )
        answer = done.stdout.decode(errors="replace")
        if done.returncode or not answer.startswith("{ok, "):
            message = (
                f"the broker's node answered {expression!r} with {answer or done.stderr.decode(errors='replace')!r}"
            )
            raise SubjectError(message)
        return answer.removeprefix("{ok, ").removesuffix("}")

    def _running(self) -> ProcessGroup:
        if self._process is None:
            message = "the broker does not run"
            raise SubjectError(message)
        return self._process

    def _environment(self) -> Mapping[str, str]:
        """Its whole configuration; files of the system's own broker are not read."""
        folder = self._folder
        arguments = _ERLANG_ARGUMENTS.format(port=self._node_port, node=self._node)
        return {
            "HOME": str(folder),
            "ERL_CRASH_DUMP": str(folder / "crash dump"),
            "RABBITMQ_ALLOW_INPUT": "true",  # the script becomes the Erlang machine instead of its parent
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{arguments} {self._erlang_arguments}",
            "RABBITMQ_CONF_ENV_FILE": str(folder / "no environment"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_PLUGINS_EXPAND_DIR": str(folder / "expanded plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_LOGS": str(folder / "log"),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_IP_ADDRESS": _HOST,
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_DIST_PORT": str(self._node_port),
        }

    def _until_started(self, process: ProcessGroup) -> None:
        assert process.stdout is not None  # noqa: S101 - for mypy: it is a pipe
        descriptor, output = process.stdout.fileno(), b""
        ends_at = time.monotonic() + _START_WITHIN_S
        while _STARTED not in output:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, ends_at - time.monotonic()))
            chunk = os.read(descriptor, 1 << 16) if readable else b""
            output += chunk
            if not chunk:
                self.kill()
                message = f"the broker did not start: {output[-_TAIL_CHARACTERS:].decode(errors='replace')}"
                raise SubjectError(message)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            # The output ends with the last of its processes: they have it from their parents.
            process.communicate(timeout=_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            message = f"the broker did not end within {_END_WITHIN_S:.0f} s"
            raise SubjectError(message) from None
        finally:
            process.kill_all()


def _server_script() -> str:
    found = Path(shutil.which("rabbitmq-server") or "").resolve()
    return str(found.with_name("rabbitmq-server") if found.name == _DEBIAN_WRAPPER else found)
