"""The token is in no repr, log line or command line."""

import logging
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

import kvpipe
from bench.remote import RemoteProgram
from bench.runner import Program
from kvpipe import _kvpipe
from kvpipe.control import ControlClient
from kvpipe.launch.spec import DeploymentSpec
from kvpipe.proxy.config import Instance, ProxyConfig
from kvpipe.testing import memory_transport

TOKEN = "kept-from-every-log"
ANOTHER_TOKEN = "kept-from-every-log-too"
HANDOFF = "00" * 16


def test_no_configuration_shows_the_token():
    engine = Instance.parse("http://127.0.0.1:1,127.0.0.1:2")
    program = Program("any", ("any",), env=(("KVPIPE_TOKEN", TOKEN),))
    shown = repr(
        [
            ProxyConfig(prefill=(engine,), decode=(engine,), token=TOKEN),
            DeploymentSpec(model="any", token=TOKEN, env={"KVPIPE_TOKEN": TOKEN}),
            program,
            RemoteProgram(program, "127.0.0.1:1", TOKEN),
        ]
    )
    assert TOKEN not in shown


def show(*objects):
    """All that the objects show of themselves, and of what they hold."""
    return "".join(f"{each!r}{each!s}{getattr(each, '__dict__', None)!r}" for each in objects)


def test_no_object_with_sessions_shows_the_token():
    with memory_transport(), ExitStack() as stack:
        agent, receiver = kvpipe.Agent(token=TOKEN), kvpipe.Pipe.listen(token=TOKEN)
        sender = kvpipe.Pipe.connect(receiver.address, TOKEN)
        control, port = ControlClient(TOKEN), open_port()
        server = kvpipe.LookupBuffer(1 << 20)
        server.serve(token=TOKEN)
        client = kvpipe.LookupBuffer.connect(server.address, token=TOKEN)
        for each in (agent, receiver, sender, server, control, port, client):
            stack.callback(each.close)
        peer = stack.enter_context(kvpipe.Agent(token=TOKEN)).connect(agent.address)
        shown = show(agent, receiver, sender, server, client, control, port, peer)
        shown += str((agent.stats(), sender.stats(), server.stats(), client.stats()))
    assert TOKEN not in shown


def open_port():
    """The control port of an engine."""
    return _kvpipe.Control("127.0.0.1:0", TOKEN.encode(), "engine")


def operate(token, serving):
    """All that asks another process for something, with its errors."""
    agent, receiver, buffer, port = serving
    client = ControlClient(token)
    attempts = (
        lambda: kvpipe.Agent(token=token).connect(agent.address),
        lambda: kvpipe.Pipe.connect(receiver.address, token, timeout=1),
        lambda: kvpipe.LookupBuffer.connect(buffer.address, token=token, timeout=1).drop_select(None, None, timeout=0),
        lambda: client.describe(port.address).wait(20),
        lambda: client.release(port.address, HANDOFF).wait(20),
    )
    for attempt in attempts:
        try:
            attempt()
        except kvpipe.KVPipeError as error:
            yield error
    client.close()


@pytest.mark.parametrize("token", [TOKEN, ANOTHER_TOKEN])
def test_neither_a_log_nor_an_error_of_a_session_shows_its_token_also_where_the_other_side_has_another(token, caplog):
    caplog.set_level(logging.DEBUG)
    with memory_transport(), ExitStack() as stack:
        agent, receiver = kvpipe.Agent(token=TOKEN), kvpipe.Pipe.listen(token=TOKEN)
        buffer, port = kvpipe.LookupBuffer(1 << 20), open_port()
        buffer.serve(token=TOKEN)
        for each in (agent, receiver, buffer, port):
            stack.callback(each.close)
        errors = list(operate(token, (agent, receiver, buffer, port)))
    refused = [error for error in errors if isinstance(error, kvpipe.AuthenticationError)]
    assert len(refused) == (0 if token == TOKEN else 5)
    shown = caplog.text + "".join(f"{error!r}{error}{error.__cause__!r}" for error in errors)
    assert TOKEN not in shown
    assert ANOTHER_TOKEN not in shown


def test_the_log_of_a_proxy_that_starts_and_ends_has_no_token():
    engine = "http://127.0.0.1:9,127.0.0.1:9"
    command = [sys.executable, "-m", "kvpipe", "proxy", "--port", "0", "--token", TOKEN]
    command += ["--prefill", engine, "--decode", engine]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as proxy:
        assert proxy.stdout is not None
        log = proxy.stdout.readline()
        proxy.send_signal(signal.SIGTERM)
        log += proxy.communicate(timeout=20)[0]
    assert "proxy" in log
    assert TOKEN not in log


def test_an_error_of_the_command_line_does_not_repeat_the_token():
    command = [sys.executable, "-m", "kvpipe", "proxy", "--token", TOKEN, "--prefill", "nonsense", "--decode", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode != 0
    assert TOKEN not in done.stdout + done.stderr
