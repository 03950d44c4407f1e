"""The command `kvpipe`: results to stdout, logs and errors to stderr.

Each command imports its modules when it runs, so that `kvpipe info` works without vLLM and without the proxy's
packages, and `kvpipe --help` is fast.
"""

import argparse
import asyncio
import importlib
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from kvpipe import __version__
from kvpipe._help import add_examples
from kvpipe.exceptions import ConfigError, KVPipeError

# argparse has no public name for the result of add_subparsers()
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001

_HOST, _PORT = "127.0.0.1", 8000
_DISPATCHES = ("just-in-time", "sequential")  # the first one is the default
_TIMEOUTS = ("connect-timeout", "frozen-after", "silence-timeout", "client-timeout", "control-timeout", "drain-timeout")
# The modules of each extra that commands import; dotenv is python-dotenv.
_MODULES = {
    "amqp": ("aio_pika", "aiormq", "yarl"),
    "bench": ("matplotlib", "numpy", "tabulate"),
    "completion": ("shtab",),
    "proxy": ("aiohttp", "dotenv", "multidict", "orjson", "prometheus_client", "uvloop"),
}
# The ends of --help: of all commands, and of each.
_EXAMPLES = {
    "": ("kvpipe up", "kvpipe doctor 10.0.0.1:7100 10.0.0.3:7200", "kvpipe proxy --help"),
    "info": ("kvpipe info",),
    "up": (
        "kvpipe up",
        "kvpipe up MODEL --prefill 1 --decode 2 --gpus 0,1,2",
        "kvpipe up MODEL --store -- --max-model-len 4096 --served-model-name demo",
    ),
    "doctor": (
        "kvpipe doctor 10.0.0.1:7100 10.0.0.3:7200",
        "kvpipe doctor http://10.0.0.1:8100,10.0.0.1:7100 http://10.0.0.3:8200,10.0.0.3:7200 --json",
    ),
    "proxy": (
        "kvpipe proxy --prefill http://10.0.0.1:8100,10.0.0.1:7100 --decode http://10.0.0.3:8200,10.0.0.3:7200",
        "kvpipe proxy --prefill http://10.0.0.1:8100 --decode http://10.0.0.3:8200 --dispatch store",
    ),
    "front": ("kvpipe front --prefill http://127.0.0.1:8100,127.0.0.1:7100 --amqp amqp://broker:5672/",),
    "worker": ("kvpipe worker --decode http://127.0.0.1:8200,127.0.0.1:7200 --amqp amqp://broker:5672/",),
    "queue": ("kvpipe queue show --amqp amqp://broker:5672/", "kvpipe queue replay"),
    "completion": (
        'eval "$(kvpipe completion bash)"',
        "kvpipe completion zsh > ~/.zfunc/_kvpipe",
    ),
}
_USAGE = 2  # the exit status of argparse for wrong usage
_LONGEST_QUERY_S = 600.0
_INTERRUPTED = 130  # the exit status of a command that SIGINT ended, as in shells


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    A `KVPipeError` is one line on stderr and status 1; wrong usage is status 2.
    """
    args = _parse(list(sys.argv[1:] if argv is None else argv))
    try:
        return int(args.command(args))
    except KVPipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parsers() -> tuple[argparse.ArgumentParser, Commands]:
    """The parser of the whole command line, and those of its commands."""
    parser = argparse.ArgumentParser(
        prog="kvpipe", description="Moves the KV cache between prefill and decode instances."
    )
    parser.add_argument("--version", action="version", version=f"kvpipe {__version__}")
    commands: Commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_info,
        _add_up,
        _add_doctor,
        _add_proxy,
        _add_front,
        _add_worker,
        _add_queue,
        _add_store,
        _add_bench,
        _add_completion,
    ):
        add(commands)
    for name, examples in _EXAMPLES.items():
        add_examples(commands.choices[name] if name else parser, examples)
    return parser, commands


def _parse(argv: list[str]) -> argparse.Namespace:
    parser, _ = _parsers()
    if argv[:1] in (["bench"], ["store"]):
        args = parser.parse_args(argv[:1])
        args.arguments = argv[1:]
        return args
    # Arguments after "--" are vLLM's; argparse must not parse them
    index = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:index])
    if index < len(argv) and args.command is not _up:
        parser.error("only `kvpipe up` takes vLLM's arguments after --")
    args.vllm_args = argv[index + 1 :]
    return args


def _add_info(commands: Commands) -> None:
    parser = commands.add_parser("info", help="print versions and what UCX supports on this machine")
    parser.set_defaults(command=_info)


def _add_up(commands: Commands) -> None:
    parser = commands.add_parser(
        "up",
        help="start prefill and decode instances and the proxy on this machine",
        usage="kvpipe up [MODEL] [options] [-- vLLM arguments for every instance]",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder or name of the model, as for vLLM; default: a tiny one with random weights, made on this machine",
    )
    parser.add_argument("--prefill", type=int, default=1, metavar="X", help="instances, default 1")
    parser.add_argument("--decode", type=int, default=1, metavar="Y", help="instances, default 1")
    parser.add_argument(
        "--undivided",
        action="store_true",
        help="start one more instance without connector and proxy, for comparison",
    )
    parser.add_argument(
        "--dispatch",
        type=_dispatch,
        choices=_DISPATCHES,
        default=_DISPATCHES[0],
        help="when decode gets a request: before the predicted end of prefill (default), or after prefill",
    )
    _add_endpoint(parser)
    parser.add_argument(
        "--store",
        nargs="?",
        const="own",
        default="",
        metavar="URL",
        help="share KV through this store, without handoffs; without a URL one is started",
    )
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens in a KV block")
    parser.add_argument(
        "--omp-threads",
        type=int,
        metavar="N",
        help="OMP threads of each instance's worker, pinned to N cores; default: all instances share all cores",
    )
    parser.add_argument(
        "--gpus",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="LIST",
        help="GPUs for the instances, such as 0,1; in turn, and shared where there are too few",
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="also write each process's log here")
    parser.set_defaults(command=_up)


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="query instances, and report what is wrong with a deployment and the remedy",
        description="Queries versions, fingerprints, ports, data paths and clocks of instances, for what is wrong.",
        epilog="exit status: 0 if nothing is wrong, 1 if something is, 2 for wrong usage",
    )
    parser.add_argument(
        "addresses",
        nargs="+",
        metavar="ADDRESS",
        help="control-host:port of an instance, or http://host:port,control-host:port as of kvpipe proxy: between "
        "instances with URLs doctor sends a short request for each pair, a test handoff",
    )
    _add_instances(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the text")
    parser.add_argument(
        "--timeout",
        type=_query_timeout,
        default=5.0,
        metavar="SECONDS",
        help="for each query of an instance, default 5",
    )
    parser.add_argument("--token", help="shared secret; better in KVPIPE_TOKEN, or KVPIPE_TOKEN_FILE")
    parser.set_defaults(command=_doctor)


def _query_timeout(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= _LONGEST_QUERY_S:
        raise argparse.ArgumentTypeError(f"{text}: expected seconds above 0, at most {_LONGEST_QUERY_S:g}")
    return seconds


def _add_proxy(commands: Commands) -> None:
    parser = commands.add_parser("proxy", help="run one OpenAI-compatible endpoint over instances")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            action="append",
            default=[],
            metavar="URL,CONTROL",
            help="http://host:port,control-host:port of an instance; may be repeated",
        )
    parser.add_argument(
        "--dispatch",
        type=_dispatch,
        choices=(*_DISPATCHES, "store", "amqp"),
        help="when decode gets a request: before the predicted end of prefill (default), or after prefill; "
        "store: after prefill, through a KV store that both share (default without control addresses); "
        "amqp: after prefill, through a RabbitMQ broker, to a decode instance that has capacity",
    )
    _add_broker(parser)
    _add_message_limit(parser)
    _add_choices(parser)
    _add_limits(parser, _TIMEOUTS)
    parser.add_argument("--max-body-bytes", type=int, metavar="N", help="largest request body, default 64 MiB")
    _add_cors(parser)
    _add_endpoint(parser)
    _add_instances(parser)
    parser.set_defaults(command=_proxy)


def _add_front(commands: Commands) -> None:
    parser = commands.add_parser(
        "front", help="run the endpoint of one prefill instance, whose decode instances are behind a broker"
    )
    parser.add_argument("--prefill", required=True, metavar="URL,CONTROL", help="the instance, as of kvpipe proxy")
    _add_broker(parser)
    _add_message_limit(parser)
    _add_choices(parser)
    _add_limits(parser, _TIMEOUTS)
    parser.add_argument("--max-body-bytes", type=int, metavar="N", help="largest request body, default 64 MiB")
    _add_cors(parser)
    _add_endpoint(parser)
    _add_instances(parser)
    parser.set_defaults(command=_front)


def _add_worker(commands: Commands) -> None:
    parser = commands.add_parser("worker", help="have a decode instance answer requests from a broker")
    parser.add_argument("--decode", required=True, metavar="URL,CONTROL", help="the instance, as of kvpipe proxy")
    parser.add_argument("--slots", type=int, metavar="N", help="requests at once, default 16")
    _add_limits(parser, ("connect-timeout", "frozen-after", "silence-timeout", "drain-timeout"))
    _add_broker(parser)
    parser.add_argument("--token", help="shared secret; better in KVPIPE_TOKEN, or KVPIPE_TOKEN_FILE")
    _add_instances(parser)
    parser.set_defaults(command=_worker)


def _add_queue(commands: Commands) -> None:
    parser = commands.add_parser("queue", help="look at the queues of a broker, and at requests that were given up")
    parser.add_argument("action", choices=("show", "list", "replay"), help="queues and workers; dead letters; again")
    parser.add_argument("ids", nargs="*", metavar="ID", help="of dead letters to replay; all without any")
    _add_broker(parser)
    _add_message_limit(parser)
    parser.set_defaults(command=_queue)


def _add_broker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--amqp", metavar="URL", help="amqp://user:password@host:port/vhost of the broker; better in KVPIPE_AMQP"
    )
    parser.add_argument("--queue", default="kvpipe", metavar="NAME", help="what the names of its queues begin with")
    parser.add_argument(
        "--delivery-limit",
        type=int,
        metavar="N",
        help="how often a request is delivered again before it is given up; the same for all, default 4",
    )


def _dispatch(text: str) -> str:
    if text == "concurrent":
        raise argparse.ArgumentTypeError("concurrent was removed: use just-in-time, which asks decode early enough")
    return text


def _add_message_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-message-bytes",
        type=int,
        metavar="N",
        help="largest request that is put into the queue, at most the broker's max_message_size; default 16777216",
    )


def _add_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on-prefill-failure",
        choices=("decode", "fail"),
        default="decode",
        help="when no prefill instance is left: decode computes the prompt (default), or the request fails",
    )
    parser.add_argument(
        "--early-token",
        choices=("on", "off"),
        default="on",
        help="whether a plain stream begins with prefill's token before decode has answered (default), or waits",
    )


def _add_limits(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Flags for fields of the command's configuration; without them its defaults hold."""
    about = {
        "connect-timeout": "to connect to an instance, and for one health probe; default 5",
        "frozen-after": "silence, on HTTP and on its control port, after which requests leave an instance; default 5",
        "silence-timeout": "how long an instance may take no byte of a request, or send none of an answer; default 600",
        "client-timeout": "how long a client may send no byte of its body, or accept none of an answer; default 60",
        "control-timeout": "for one question to a control port, and for decode's answer to /tokenize; default 5",
        "drain-timeout": "how long requests may go on after SIGTERM or SIGINT",
    }
    for name in names:
        parser.add_argument(f"--{name}", type=float, dest=_field_of(name), metavar="SECONDS", help=about[name])


def _limits(args: argparse.Namespace) -> dict[str, Any]:
    """The limits that were given, by their fields."""
    given = {name: getattr(args, name, None) for name in (*map(_field_of, _TIMEOUTS), "max_body_bytes")}
    return {name: value for name, value in given.items() if value is not None}


def _field_of(timeout: str) -> str:
    return f"{timeout.replace('-', '_')}_s"


def _add_cors(parser: argparse.ArgumentParser) -> None:
    about = {
        "origins": "web pages that may use the proxy from a browser",
        "methods": "methods that such a page may use",
        "headers": "headers that such a page may send",
    }
    for name, text in about.items():
        default = "[]" if name == "origins" else '["*"]'
        parser.add_argument(
            f"--allowed-{name}", type=_json_list, default=default, metavar="JSON", help=f"{text}, default {default}"
        )
    parser.add_argument(
        "--allow-credentials", action="store_true", help="such a page may send the browser's cookies and credentials"
    )


def _json_list(text: str) -> tuple[str, ...]:
    """Reads a JSON list of strings, as vLLM's flags of the same names have it."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        message = f'{text!r}: must be a JSON list of strings, such as ["https://host"]'
        raise argparse.ArgumentTypeError(message)
    return tuple(values)


def _add_endpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address of the proxy, default loopback")
    parser.add_argument("--port", type=int, help="port of the proxy, default 8000; 0 picks a free one")
    files = {
        "--ssl-certfile": "certificate of the proxy, with which it speaks TLS alone; read again when it changes",
        "--ssl-keyfile": "private key of the certificate",
        "--api-key-file": "API keys, one a line, of which requests need one; read again when it changes",
    }
    for flag, text in files.items():
        parser.add_argument(flag, type=Path, metavar="FILE", help=text)
    parser.add_argument(
        "--split-from",
        type=int,
        metavar="TOKENS",
        help="prompts of fewer tokens go to decode alone, without a prefill instance; 0 splits every prompt",
    )
    parser.add_argument(
        "--token", help="shared secret; better in KVPIPE_TOKEN, or KVPIPE_TOKEN_FILE, which other users cannot see"
    )


def _files_of_endpoint(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("ssl_certfile", "ssl_keyfile", "api_key_file")}


def _add_instances(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--instances-ca-file",
        type=Path,
        metavar="FILE",
        help="CA certificates of https:// instances; default: those that the system trusts",
    )
    parser.add_argument(
        "--instances-api-key-file",
        type=Path,
        metavar="FILE",
        help="the API key that instances get, instead of that of a client",
    )


def _files_of_instances(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("instances_ca_file", "instances_api_key_file")}


def _add_store(commands: Commands) -> None:
    parser = commands.add_parser("store", help="serve a store of KV for all instances, or look at one", add_help=False)
    parser.set_defaults(command=_store)


def _add_bench(commands: Commands) -> None:
    # `bench.command` of the checkout parses the arguments, because their defaults need its imports
    parser = commands.add_parser(
        "bench", help="measure kvpipe beside other transports and connectors, in a checkout", add_help=False
    )
    parser.set_defaults(command=_bench)


def _add_completion(commands: Commands) -> None:
    parser = commands.add_parser("completion", help="print a script that completes kvpipe's commands in a shell")
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")
    parser.set_defaults(command=_completion)


def _info(_: argparse.Namespace) -> int:
    from kvpipe import info

    facts: Mapping[str, Any] = info()
    for key, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple | set) else value
        print(f"{key}: {text}")
    return 0


def _up(args: argparse.Namespace) -> int:
    try:
        from kvpipe import proxy  # noqa: F401 - started last, in a process of its own: what it lacks is known here first
        from kvpipe.launch.deployment import DeploymentSpec
        from kvpipe.launch.up import TINY_MODEL_ARGS, default_model, run_up
    except ImportError as error:
        raise _missing(error, "proxy") from error
    is_named = args.model is not None
    spec = DeploymentSpec(
        model=args.model if is_named else str(default_model()),
        num_prefill=args.prefill,
        num_decode=args.decode,
        num_undivided=int(args.undivided),
        host=_HOST if args.host is None else args.host,
        port=_PORT if args.port is None else args.port,
        dispatch=args.dispatch,
        store=args.store,
        split_from=args.split_from,
        block_size=args.block_size,
        omp_threads=args.omp_threads,
        gpus=args.gpus,
        token=args.token,
        vllm_args=args.vllm_args if is_named else (*TINY_MODEL_ARGS, *args.vllm_args),
        log_dir=args.log_dir,
        **_files_of_endpoint(args),
    )
    return asyncio.run(run_up(spec))


def _doctor(args: argparse.Namespace) -> int:
    from kvpipe.doctor.examine import examine
    from kvpipe.doctor.facts import InstanceAddress
    from kvpipe.doctor.findings import find
    from kvpipe.doctor.report import document, is_healthy, text

    # Findings have what the sessions of this process would log.
    logging.getLogger("kvpipe").addHandler(logging.NullHandler())
    try:
        targets = list(dict.fromkeys(map(InstanceAddress.parse, args.addresses)))
        asked = examine(
            targets,
            token=args.token,
            timeout_s=args.timeout,
            announce=partial(print, file=sys.stderr),
            **_files_of_instances(args),
        )
        facts = asyncio.run(asked)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    except ModuleNotFoundError as error:
        raise _missing(error, "proxy") from error
    findings = find(facts)
    print(json.dumps(document(facts, findings), indent=2) if args.json else text(facts, findings))
    return 0 if is_healthy(findings) else 1


def _proxy(args: argparse.Namespace) -> int:
    try:
        from kvpipe import proxy
    except ImportError as error:
        raise _missing(error, "amqp" if args.dispatch == "amqp" else "proxy") from error
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    environment = proxy.Environment.read()
    prefill = tuple(map(proxy.Instance.parse, args.prefill)) or environment.prefill
    has_control = not prefill or any(instance.control for instance in prefill)
    dispatch: Any = args.dispatch or (_DISPATCHES[0] if has_control else "store")
    if args.amqp and dispatch != "amqp":
        raise ConfigError(f"--amqp with dispatch {dispatch}: add --dispatch amqp, or leave --amqp out")
    decode = tuple(map(proxy.Instance.parse, args.decode)) or (() if dispatch == "amqp" else environment.decode)
    config = proxy.ProxyConfig(
        prefill=prefill,
        decode=decode,
        host=args.host or environment.host or _HOST,
        port=next(port for port in (args.port, environment.port, _PORT) if port is not None),
        dispatch=dispatch,
        on_prefill_failure=args.on_prefill_failure,
        early_token=args.early_token == "on",  # noqa: S105 - not a secret
        token=args.token or os.environ.get("KVPIPE_TOKEN"),
        allowed_origins=args.allowed_origins,
        allowed_methods=args.allowed_methods,
        allowed_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        **_files_of_endpoint(args),
        **_files_of_instances(args),
        **({} if args.split_from is None else {"split_from": args.split_from}),
        **_limits(args),
    )
    try:
        if dispatch == "amqp":
            _queue_commands().run_front(config, *_broker(args))
        else:
            proxy.run(config)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error
    return 0


def _front(args: argparse.Namespace) -> int:
    args.prefill, args.decode, args.dispatch = [args.prefill], [], "amqp"
    return _proxy(args)


def _worker(args: argparse.Namespace) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    commands = _queue_commands()
    from kvpipe.proxy import Instance

    url, topology = _broker(args)
    given = _limits(args) | _files_of_instances(args) | ({} if args.slots is None else {"num_slots": args.slots})
    token = args.token or os.environ.get("KVPIPE_TOKEN")
    commands.run_worker(commands.WorkerConfig(url, topology, Instance.parse(args.decode), token=token, **given))
    return 0


def _queue(args: argparse.Namespace) -> int:
    return int(_queue_commands().show(args.action, args.ids, *_broker(args)))


def _queue_commands() -> Any:
    try:
        from kvpipe.queue import command
    except ImportError as error:
        raise _missing(error, "amqp") from error
    return command


def _broker(args: argparse.Namespace) -> tuple[str, Any]:
    """URL and queues of the broker that the arguments name."""
    from kvpipe.queue.topology import Topology

    url = args.amqp or os.environ.get("KVPIPE_AMQP")
    if not url:
        raise ConfigError("no broker: expected --amqp amqp://user:password@host:port/vhost, or KVPIPE_AMQP")
    given = {name: getattr(args, name, None) for name in ("delivery_limit", "max_message_bytes")}
    return url, Topology(args.queue, **{name: value for name, value in given.items() if value is not None})


def _store(args: argparse.Namespace) -> int:
    from kvpipe.store import command

    return command.main(args.arguments)


def _completion(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise _missing(error, "completion") from error
    from kvpipe.store import command

    parser, commands = _parsers()
    commands.choices["store"] = command.parser()
    print(shtab.complete(parser, args.shell))
    return 0


def _bench(args: argparse.Namespace) -> int:
    sys.path.insert(0, str(_checkout()))
    try:
        command = importlib.import_module("bench.command")
    except ImportError as error:
        raise _missing(error, "bench") from error
    return int(command.main(args.arguments))


def _checkout() -> Path:
    """The folder with the harness: that of an editable installation, or else the current one."""
    for folder in (Path(__file__).parents[2], Path.cwd()):
        if (folder / "bench" / "command.py").is_file():
            return folder
    raise ConfigError(
        "the benchmarks are in kvpipe's repository, not in its wheel: clone it, and run `kvpipe bench` in its folder"
    )


def _missing(error: ImportError, extra: str) -> KVPipeError:
    """Names the command's extra if a package of an extra is missing or too old; any other failed import is a bug."""
    module = (error.name or "").partition(".")[0]
    if module not in itertools.chain.from_iterable(_MODULES.values()):
        raise error
    if not isinstance(error, ModuleNotFoundError):
        return ConfigError(f"{module} is too old ({error.msg}); pip install --upgrade 'kvpipe[{extra}]'")
    return ConfigError(f"{module} is not installed; pip install 'kvpipe[{extra}]'")
