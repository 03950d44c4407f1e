import os
import re
import shlex
import subprocess
import sys

import pytest

from kvpipe import __version__, cli
from kvpipe.cli import main
from kvpipe.store import command
from tests.peers import ROOT


def kvpipe(*args):
    command = [sys.executable, "-m", "kvpipe", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"kvpipe {__version__}\n")


def test_info_prints_a_key_and_a_value_a_line_to_stdout():
    done = kvpipe("info")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("kvpipe: ") for line in lines)
    assert all(": " in line for line in lines)


def test_help_names_every_command_and_loads_nothing_heavy():
    command = [sys.executable, "-X", "importtime", "-m", "kvpipe", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert all(name in done.stdout for name in ("info", "up", "doctor", "proxy", "bench"))
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "vllm", "numpy", "aiohttp"}


HELPS = {
    **{f"kvpipe {name}".strip(): examples for name, examples in cli._EXAMPLES.items()},
    **{f"kvpipe store {name}".strip(): examples for name, examples in command._EXAMPLES.items()},
}


def parsers():
    """Each command's parser by its name."""
    whole, commands = cli._parsers()
    commands.choices["store"] = store = command.parser()
    of_store = next(action.choices for action in store._actions if action.dest == "==SUPPRESS==" and action.choices)
    named = {"kvpipe": whole} | {f"kvpipe {name}": parser for name, parser in commands.choices.items()}
    return named | {f"kvpipe store {name}": parser for name, parser in of_store.items()}


def test_every_help_ends_with_one_to_three_examples():
    # That of bench is in the repository alone.
    assert set(HELPS) == set(parsers()) - {"kvpipe bench"}
    for name, parser in parsers().items():
        if name in HELPS:
            assert 1 <= len(HELPS[name]) <= 3
            assert parser.format_help().endswith("examples:\n  " + "\n  ".join(HELPS[name]) + "\n")
    done = kvpipe("bench", "--help")
    assert 1 <= len(done.stdout.partition("examples:\n")[2].splitlines()) <= 3


def commands_of_pages():
    """Each command of kvpipe in the shell examples of README.md, docs/ and examples/."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    text = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return set(re.findall(r"^(?:\w+=\S+ )*(kvpipe .*)$", text, re.MULTILINE))


def test_the_commands_of_the_pages_are_found():
    assert commands_of_pages() >= {"kvpipe doctor 10.0.0.1:7100 10.0.0.3:7200", "kvpipe info"}


@pytest.mark.parametrize(
    "example", sorted({example for examples in HELPS.values() for example in examples} | commands_of_pages())
)
def test_an_example_of_a_help_or_of_a_page_is_accepted(example):
    command_line = example.removeprefix('eval "$(').removesuffix(')"').partition(" >")[0]
    _, name, *arguments = shlex.split(command_line, comments=True)
    if name == "store":
        command.parser().parse_args(arguments)
    elif "--help" not in arguments:
        cli._parse([name, *arguments])


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["st"], {"store"}),
        (["doc"], {"doctor"}),
        (["proxy", "--dis"], {"--dispatch"}),
        (["proxy", "--dispatch", "s"], {"sequential", "store"}),
        (["store", "s"], {"serve", "stats"}),
    ],
)
def test_bash_completes_commands_flags_and_values(words, completed, capsys):
    assert main(["completion", "bash"]) == 0
    line = shlex.join(["kvpipe", *words])
    script = f"""{capsys.readouterr().out}
function=$(complete -p kvpipe | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=({line}) COMP_CWORD={len(words)}
$function kvpipe {shlex.quote(words[-1])} {shlex.quote(words[-2] if words[1:] else "kvpipe")}
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) == completed


def test_the_script_for_zsh_completes_kvpipe(capsys):
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef kvpipe")


def test_an_error_is_one_line_without_traceback():
    done = kvpipe("proxy", "--prefill", "nonsense", "--decode", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: instance 'nonsense'")
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_bench_runs_in_a_checkout_and_an_installed_wheel_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages/kvpipe/cli.py"))
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "pipe"]) == 1
    assert capsys.readouterr().err == (
        "error: the benchmarks are in kvpipe's repository, not in its wheel: "
        "clone it, and run `kvpipe bench` in its folder\n"
    )
    monkeypatch.chdir(ROOT)
    assert cli._checkout() == ROOT


def started(*options, **process):
    """The proxy's line about its settings."""
    command = [sys.executable, "-m", "kvpipe", "proxy", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **process) as running:
        line = next((line for line in running.stderr if "proxy.listening" in line), "")
        running.terminate()
    return line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "dispatch=just-in-time early_token=on split_from=0"),
        (
            ["--dispatch", "sequential", "--early-token", "off", "--split-from", "9"],
            "dispatch=sequential early_token=off split_from=9",
        ),
    ],
)
def test_the_proxy_has_the_settings_of_its_options(options, expected):
    instances = ["--prefill", "http://127.0.0.1:1,127.0.0.1:1", "--decode", "http://127.0.0.1:1"]
    line = started(*instances, "--port", "0", *options)
    assert line.endswith(f"{expected}\n")


def test_the_proxy_has_the_settings_of_the_environment_and_of_a_file_where_there_are_no_flags(tmp_path):
    (tmp_path / ".env").write_text("DECODE_ENDPOINTS=http://127.0.0.1:1\nLISTEN_HOST=127.0.0.2\nLISTEN_PORT=1\n")
    environment = os.environ | {"PREFILL_ENDPOINTS": "http://127.0.0.1:2", "LISTEN_PORT": "0"}
    line = started(cwd=tmp_path, env=environment)
    assert "host=127.0.0.2" in line
    assert "dispatch=store" in line
    assert "dispatch=sequential" in started(
        "--prefill", "http://127.0.0.1:2,127.0.0.1:3", "--dispatch", "sequential", cwd=tmp_path, env=environment
    )


TIMEOUTS = ("connect", "silence", "client", "control", "drain")
PROXY = ("proxy", "--prefill", "http://p:1,p:2", "--decode", "http://d:1")
FRONT = ("front", "--prefill", "http://p:1,p:2", "--amqp", "amqp://b")
WORKER = ("worker", "--decode", "http://d:1,d:2", "--amqp", "amqp://b")


@pytest.mark.parametrize(
    ("command", "timeout"),
    [(command, timeout) for command in (PROXY, FRONT) for timeout in TIMEOUTS]
    + [(WORKER, timeout) for timeout in ("connect", "silence", "drain")],
)
def test_every_limit_has_a_flag_and_a_wrong_value_names_its_setting(capsys, command, timeout):
    for wrong in ("0", "-1", "inf", "nan"):
        assert main([*command, f"--{timeout}-timeout", wrong]) == 1
        named = f"error: {timeout}_timeout_s={float(wrong)}: must be more than 0 seconds, and finite\n"
        assert capsys.readouterr().err == named


@pytest.mark.parametrize("command", [PROXY, FRONT, WORKER], ids=lambda command: command[0])
def test_authorities_of_instances_have_a_flag(capsys, command):
    assert main([*command, "--instances-ca-file", "ca.pem"]) == 1
    named = "error: instances_ca_file='ca.pem': must be left out, or an instance written as https://host:port\n"
    assert capsys.readouterr().err == named


@pytest.mark.parametrize("command", [PROXY, FRONT])
def test_the_largest_body_has_a_flag(capsys, command):
    assert main([*command, "--max-body-bytes", "0"]) == 1
    assert capsys.readouterr().err == "error: max_body_bytes=0: must be at least 1\n"


def test_up_without_instances_is_refused(capsys):
    assert main(["up", "model", "--prefill", "0"]) == 1
    assert capsys.readouterr().err == "error: num_prefill must be at least 1, not 0\n"


def test_a_proxy_without_instances_is_refused_with_the_flag_that_names_one(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)  # no .env
    for name in ("PREFILL_ENDPOINTS", "DECODE_ENDPOINTS"):
        monkeypatch.delenv(name, raising=False)
    assert main(["proxy"]) == 1
    example = "--prefill http://host:port,control-host:port, or without the latter for dispatch='store'"
    assert capsys.readouterr().err == f"error: prefill=[]: must be at least one instance: {example}\n"


def test_only_up_takes_arguments_for_vllm(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["info", "--", "--dtype", "float32"])
    assert "only `kvpipe up` takes vLLM's arguments" in capsys.readouterr().err


def test_a_missing_command_shows_the_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "usage: kvpipe" in capsys.readouterr().err


def test_a_broker_without_its_dispatch_is_refused(capsys):
    arguments = ["proxy", "--prefill", "http://p:1,p:2", "--decode", "http://d:1", "--amqp", "amqp://b"]
    assert main(arguments) == 1
    assert "--amqp with dispatch just-in-time: add --dispatch amqp" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["proxy"], ["up", "model"]])
def test_a_dispatch_that_was_removed_is_refused_by_name_with_its_successor(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--dispatch", "concurrent"])
    assert "concurrent was removed: use just-in-time" in capsys.readouterr().err


WORKER = ["worker", "--decode", "http://127.0.0.1:3", "--amqp", "amqp://127.0.0.1:1"]


def test_the_time_after_which_an_instance_is_frozen_has_a_flag(capsys):
    instances = ["--prefill", "http://127.0.0.1:1,127.0.0.1:2", "--decode", "http://127.0.0.1:3"]
    assert main(["proxy", *instances, "--frozen-after", "0"]) == 1
    assert "frozen_after_s=0.0: must be more than 0 seconds" in capsys.readouterr().err
    assert main([*WORKER, "--frozen-after", "0"]) == 1
    assert "frozen_after_s=0.0: must be more than 0 seconds" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "frozen_after_s"), [([], 5.0), (["--frozen-after", "7"], 7.0)])
def test_the_flag_of_a_worker_reaches_it(monkeypatch, flag, frozen_after_s):
    given = []

    class Worker:
        def __init__(self, *_, **settings):
            given.append(settings["frozen_after_s"])

        async def run(self, *_):
            """Takes no request."""

    monkeypatch.setattr("kvpipe.queue.command.Worker", Worker)
    assert main([*WORKER, *flag]) == 0
    assert given == [frozen_after_s]


def test_a_package_that_is_too_old_is_named_with_the_command():
    code = (
        "import sys, aiohttp.helpers; del aiohttp.helpers.DEFAULT_CHUNK_SIZE; from kvpipe.cli import main; "
        "sys.exit(main(['proxy', '--prefill', 'http://127.0.0.1:1,127.0.0.1:2', '--decode', 'http://127.0.0.1:3']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: aiohttp is too old (cannot import name 'DEFAULT_CHUNK_SIZE'")
    assert done.stderr.endswith("pip install --upgrade 'kvpipe[proxy]'\n")
