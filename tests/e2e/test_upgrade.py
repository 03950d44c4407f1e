"""A rolling upgrade under load, with the rotation of the token: an older build of kvpipe beside this one.

The order is that of docs/guide/upgrade.md. Instances have `--shutdown-timeout`, so that they finish streams that have
begun, with which no other instance can go on. They get requests until they have ended. They share a store beside their
handoffs, and keep nothing in caches of their own: a prompt that comes again is loaded from the store. At the end the
store server goes back to the older build.

`KVPIPE_UPGRADE_REQUESTS` sends at least so many requests, and replaces everything in all three steps of the rotation.
"""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvpipe.launch.deployment import DeploymentSpec, DeploymentThread, Instance
from kvpipe.launch.ports import free_ports
from kvpipe.launch.process import ProcessGroup
from kvpipe.launch.watchdog import Watchdog, group_members
from tests.e2e.client import (
    COMPLETIONS,
    LEASE_S,
    completion,
    get,
    post,
    prompt,
    streamed_text,
    text_of,
    until,
)
from tests.e2e.groups import (
    COMMON,
    LOGS,
    REPOSITORY,
    ROOMY,
    STORE_CHUNK,
    Groups,
    beside_store,
    change_transfer,
    tiny_model,
)
from tests.e2e.test_store import chunks
from tests.zygote import Zygote

# The last release, or the last landed build until there is one (docs/internals/release.md moves it).
OLDER_BUILD = "2632e04d"

NUM_REQUESTS = int(os.environ.get("KVPIPE_UPGRADE_REQUESTS", "0"))
NUM_CLIENTS = 4
# 32 MiB of KV each.
SMALL = ("--num-gpu-blocks-override", "256", "--no-enable-prefix-caching")
DRAIN = ("--shutdown-timeout", "45")
BODIES = [completion(prompt(length, seed=400), max_tokens=16, ignore_eos=True) for length in (40, 97, 130, 256, 333)]
# Each of them comes so often with one salt.
NUM_REPEATS = 2
# The whole chunks of the last of them.
KEPT_TOKENS = len(BODIES[-1]["prompt"]) // STORE_CHUNK * STORE_CHUNK
# Handoffs from old to new, and from new to old, that the half of an upgrade waits for.
NUM_MIXED = 3
# Chunks that each P loads from a store server before anything else is replaced.
NUM_LOADED = 10
STOP_S = 90
FOLDER = LOGS / "upgrade"
PAIR = re.compile(r"request\.end .*?handoff=(\w+) .*?prefill=(\S+) decode=(\S+)")
FIRST, SECOND = "the first token of the upgrade", "the second token of the upgrade"


@dataclass(frozen=True)
class Tokens:
    """What a process proves and accepts."""

    current: str
    following: str = ""

    def env(self) -> dict[str, str]:
        """Its variables."""
        return {"KVPIPE_TOKEN": self.current} | ({"KVPIPE_TOKEN_NEXT": self.following} if self.following else {})


ROTATION = (Tokens(FIRST, SECOND), Tokens(SECOND, FIRST), Tokens(SECOND))
# Old processes have the tokens of the first step, and new ones start with those of the second.
BEFORE, STEPS = (Tokens(FIRST), ROTATION) if NUM_REQUESTS else (ROTATION[0], ROTATION[1:2])


def answer(url: str, body: dict[str, Any]) -> str:
    """The text of an answer, or what came instead."""
    try:
        with post(url, COMPLETIONS, body) as response:
            payload = response.read()
        if response.status != 200:
            return f"{response.status} {payload.decode()}"
        return streamed_text(payload) if body.get("stream") else text_of(json.loads(payload))
    except (OSError, AssertionError, LookupError) as error:
        return repr(error)


def num_loaded_tokens(instance: Instance, body: dict[str, Any]) -> int:
    """The tokens of a prompt that were not computed."""
    with post(instance.url, COMPLETIONS, body) as response:
        return json.loads(response.read())["usage"]["prompt_tokens_details"]["cached_tokens"]


class Upgrade:
    """The processes, which are replaced one by one: two P, two D, the proxy and the store server.

    Args:
        running: The instances.
        older_build: Folder of the old build.
        zygotes: What instances are forked from, by whether they run this build.
        programs: Ends the other processes.
        watchdog: Ends them if this process dies.
        disk: The store server's directory.

    Attributes:
        url: Address of the proxy.
        is_new: Addresses of the instances that run this build.
    """

    url = ""

    def __init__(
        self,
        running: DeploymentThread,
        older_build: Path,
        zygotes: dict[bool, Zygote],
        programs: ExitStack,
        *,
        watchdog: Watchdog,
        disk: Path,
    ) -> None:
        self._running, self.instances = running, running.deployment
        self._old, self._zygotes = older_build, zygotes
        self._programs, self._watchdog = programs, watchdog
        self.is_new: set[str] = set()
        address, metrics_address = (f"127.0.0.1:{port}" for port in free_ports(2))
        self._store_command = (
            *("store", "serve", "--listen", address, "--disk", str(disk), "--disk-capacity", "1GiB"),
            *("--metrics-port", metrics_address.rpartition(":")[2]),
        )
        self.store_url, self._store_metrics = f"kvpipe://{address}", f"http://{metrics_address}"
        self._store: ProcessGroup | None = None
        self._proxy: ProcessGroup | None = None

    def prepare(self, instance: Instance, tokens: Tokens, *, is_new: bool) -> None:
        """Has the next start of an instance run this build or the old one."""
        child, command = instance.child, self._zygotes[is_new].command()
        child.command = (*command, *child.command[len(command) :])
        child.env.pop("KVPIPE_TOKEN_NEXT", None)
        child.env |= self._env(tokens, is_new=is_new)

    def _env(self, tokens: Tokens, *, is_new: bool) -> dict[str, str]:
        path = (REPOSITORY / "python" if is_new else self._old, REPOSITORY)
        return tokens.env() | {"PYTHONPATH": os.pathsep.join(map(str, path))}

    def is_old(self, pid: int) -> bool:
        """True if a process, or one of its group, has loaded the old build's extension; false if that of this build."""
        maps = "".join(Path(f"/proc/{each}/maps").read_text() for each in group_members(pid) if is_alive(each))
        loaded = set(re.findall(r"/\S+/_kvpipe\.abi3\.so", maps))
        assert len(loaded) == 1, loaded
        return loaded == {str(self._old / "kvpipe" / "_kvpipe.abi3.so")}

    def replace(self, instance: Instance, tokens: Tokens) -> None:
        """Drains an instance, and starts this build of it at the same address."""
        child = instance.child
        child.send_signal(signal.SIGTERM)
        self._running.call(asyncio.wait_for(child.wait(), STOP_S))
        self._running.call(child.stop(0))
        self.prepare(instance, tokens, is_new=True)
        self._running.call(child.start())
        self._running.call(self.instances.until_healthy([instance]))
        self.is_new.add(instance.url)
        assert not self.is_old(child.pid)

    def replace_store(self, tokens: Tokens, *, is_new: bool = True) -> None:
        """Ends the store server, and starts one at the same address, with the same directory."""
        if self._store is not None:
            self._end(self._store)
        env = self._env(tokens, is_new=is_new)
        self._store = self._started("store", self._store_command, self._store_metrics, env)
        assert self.is_old(self._store.pid) != is_new

    def replace_proxy(self, tokens: Tokens, *, is_new: bool = True) -> None:
        """Starts a proxy beside the present one, moves the traffic there, and drains the other."""
        before, [port] = self._proxy, free_ports(1)
        command, url = ["proxy", "--port", str(port)], f"http://127.0.0.1:{port}"
        for each in self.instances.instances:
            command += [f"--{each.role}", f"{each.url},{each.control}"]
        self._proxy = self._started(f"proxy-{port}", command, url, self._env(tokens, is_new=is_new))
        assert self.is_old(self._proxy.pid) != is_new
        self.url, self._proxy_log = url, FOLDER / f"proxy-{port}.log"
        if before is not None:
            self._end(before)

    def _started(self, name: str, command: Iterable[str], url: str, env: dict[str, str]) -> ProcessGroup:
        """A process of kvpipe's that is no instance, healthy."""
        with (FOLDER / f"{name}.log").open("ab") as log:
            process = ProcessGroup(
                [sys.executable, "-m", "kvpipe", *command], watchdog=self._watchdog, stdout=log, env=os.environ | env
            )
        self._programs.callback(process.kill_all)
        until(lambda: process.poll() is not None or is_healthy(url))
        assert process.returncode is None, f"{name} has ended"
        return process

    @staticmethod
    def _end(process: ProcessGroup) -> None:
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0

    def until_loaded(self) -> None:
        """Waits until the load has had each P load KV from the store server."""
        before = [chunks(each, "loaded") for each in self.instances.prefill]
        until(
            lambda: all(
                chunks(each, "loaded") >= number + NUM_LOADED
                for each, number in zip(self.instances.prefill, before, strict=True)
            )
        )

    def mixed_results(self) -> dict[tuple[bool, bool], Counter[str]]:
        """Results of handoffs between different builds since the last replacement, by which of P and D is new."""
        results: dict[tuple[bool, bool], Counter[str]] = {(False, True): Counter(), (True, False): Counter()}
        begin = self._proxy_log.stat().st_size

        def has_enough() -> bool:
            with self._proxy_log.open() as log:
                log.seek(begin)
                found = PAIR.findall(log.read())
            for counts in results.values():
                counts.clear()
            for handoff, *pair in found:
                builds = tuple(url in self.is_new for url in pair)
                if builds in results and (status := get(self.url, f"/status/{handoff}")):
                    results[builds][json.loads(status).get("result", "unknown")] += 1
            return all(counts.total() >= NUM_MIXED for counts in results.values())

        until(has_enough)
        return results


def is_healthy(url: str) -> bool:
    """True if `/health` is answered with 200 there."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return response.status == 200
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    """True if a process has not ended."""
    return Path(f"/proc/{pid}/maps").exists()


@dataclass
class Load:
    """Clients that send one request after the other to the proxy that is the present one at that time."""

    upgrade: Upgrade
    expected: list[str]
    wrong: list[str] = field(default_factory=list)
    num_answered: int = 0
    has_ended: threading.Event = field(default_factory=threading.Event)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sends meanwhile, and until there are enough requests."""
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            results = [clients.submit(self._send) for _ in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                self.has_ended.set()
        for result in results:
            result.result()

    def _send(self) -> None:
        while (number := next(self._numbers)) < NUM_REQUESTS or not self.has_ended.is_set():
            which = number % len(BODIES)
            salt = str(number // (NUM_REPEATS * len(BODIES)))
            outcome = self._ask(BODIES[which] | {"cache_salt": salt, "stream": number % 2 == 1})
            with self._lock:
                self.num_answered += 1
                if outcome != self.expected[which]:
                    self.wrong.append(f"request {number}: {outcome}")

    def _ask(self, body: dict[str, Any]) -> str:
        """The answer of the present proxy: the one that a client knows may have ended before it connects."""
        while True:
            url = self.upgrade.url
            outcome = answer(url, body)
            if not outcome.startswith(ConnectionRefusedError.__name__) or url == self.upgrade.url:
                return outcome


@pytest.fixture(scope="module")
def older_build() -> Path:
    """The folder of the older build, which `scripts/build-of` makes once; that takes minutes of CPU time."""
    command = ["git", "-C", str(REPOSITORY), "cat-file", "-e", f"{OLDER_BUILD}^{{commit}}"]
    if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip(f"the older build {OLDER_BUILD} is not in this clone: git fetch --unshallow --tags")
    commit = subprocess.check_output(
        ["git", "-C", str(REPOSITORY), "rev-parse", f"{OLDER_BUILD}^{{commit}}"], text=True
    )
    folder = (REPOSITORY / ".cache" / "builds" / commit.strip()).resolve()
    if not folder.exists():
        pytest.skip(f"the older build is not made: scripts/build-of {OLDER_BUILD}")
    return folder


@pytest.fixture
def upgrade(groups: Groups, zygote: Zygote, older_build: Path, tmp_path: Path) -> Iterator[Upgrade]:
    """Two P, two D, their proxy and their store server, all of the older build."""
    groups.end()
    FOLDER.mkdir(parents=True, exist_ok=True)
    spec = DeploymentSpec(
        model=tiny_model(),
        num_prefill=2,
        num_decode=2,
        block_size=32,
        server_command=zygote.command(),
        proxy_command=None,
        connector_config={"lease_s": LEASE_S},
        vllm_args=(*COMMON, *ROOMY, *SMALL, *DRAIN),
        log_dir=FOLDER,
    )
    path = os.pathsep.join([str(older_build), str(REPOSITORY)])
    with (
        pytest.MonkeyPatch.context() as patch,
        Zygote(env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, log=LOGS / "zygote-older.log") as older,
        ExitStack() as programs,
    ):
        patch.setenv("OMP_NUM_THREADS", "1")
        running = DeploymentThread(spec, report=print)
        watchdog = Watchdog()
        programs.callback(lambda: asyncio.run(watchdog.close()))
        zygotes = {False: older, True: zygote}
        upgrade = Upgrade(running, older_build, zygotes, programs, watchdog=watchdog, disk=tmp_path)
        for instance in running.deployment.instances:
            change_transfer(instance, lambda config: beside_store(config, upgrade.store_url))
            upgrade.prepare(instance, BEFORE, is_new=False)
        upgrade.replace_store(BEFORE, is_new=False)
        with running:
            upgrade.replace_proxy(BEFORE, is_new=False)
            yield upgrade


def shares_protocol() -> bool:
    """True if both builds speak one version of the protocol."""
    path = "rust/core/src/net/version.rs"
    older = subprocess.run(["git", "show", f"{OLDER_BUILD}:{path}"], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
    number = re.compile(rb"PROTOCOL_VERSION: u16 = (\d+)")
    return number.findall(older.stdout) == number.findall((REPOSITORY / path).read_bytes())


def test_a_rolling_upgrade_with_a_new_token_loses_no_request(upgrade: Upgrade) -> None:
    (first_p, second_p), (first_d, second_d) = upgrade.instances.prefill, upgrade.instances.decode
    assert all(upgrade.is_old(each.child.pid) for each in upgrade.instances.processes)
    load = Load(upgrade, [answer(second_p.url, body) for body in BODIES])
    began = time.monotonic()
    with load.running():
        for number, tokens in enumerate(STEPS):
            upgrade.replace_proxy(tokens)
            upgrade.replace_store(tokens)
            if shares_protocol():
                upgrade.until_loaded()
                # D saves nothing: these chunks are of the server before.
                until(lambda: num_loaded_tokens(first_d, BODIES[-1]) == KEPT_TOKENS)
            upgrade.replace(first_p, tokens)
            upgrade.replace(first_d, tokens)
            if number == 0:
                results = upgrade.mixed_results()
            upgrade.replace(second_p, tokens)
            upgrade.replace(second_d, tokens)
        if shares_protocol():
            upgrade.replace_store(tokens, is_new=False)
            upgrade.until_loaded()
    print(f"{load.num_answered} requests, {len(load.wrong)} lost, {time.monotonic() - began:.0f} s, mixed: {results}")
    assert load.wrong == []
    for counts in results.values():
        assert ("full" in counts) == shares_protocol()
