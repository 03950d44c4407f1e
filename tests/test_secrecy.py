"""The token is in no repr, log line or command line."""

import signal
import subprocess
import sys

import kvpipe
from kvpipe.bench.remote import RemoteProgram
from kvpipe.bench.runner import Program
from kvpipe.launch.spec import DeploymentSpec
from kvpipe.proxy.config import Instance, ProxyConfig
from kvpipe.testing import memory_transport

TOKEN = "kept-from-every-log"


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


def test_no_object_with_sessions_shows_the_token():
    with memory_transport(), kvpipe.Agent(token=TOKEN) as agent, kvpipe.Pipe.listen(token=TOKEN) as pipe:
        shown = "".join(f"{each!r}{each!s}{vars(each)!r}" for each in (agent, pipe))
    assert TOKEN not in shown


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
