"""A rolling upgrade under load, with the rotation of the token: an older build of kvpipe beside this one.

The order is that of docs/guide/upgrade.md. Instances have `--shutdown-timeout`, so that they finish streams that have
begun, with which no other instance can go on. They get requests until they have ended.

`KVPIPE_UPGRADE_REQUESTS` sends at least so many requests, and replaces everything in all three steps of the rotation.
"""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvpipe.launch.deployment import Deployment, DeploymentSpec, DeploymentThread, Instance
from kvpipe.launch.ports import free_ports
from kvpipe.launch.process import ChildProcess
from kvpipe.launch.watchdog import Watchdog, group_members
from tests.e2e.client import COMPLETIONS, LEASE_S, completion, get, post, prompt, streamed_text, text_of, until
from tests.e2e.groups import COMMON, LOGS, REPOSITORY, ROOMY, Groups, tiny_model
from tests.zygote import Zygote

# The last release, or the last landed build until there is one (docs/internals/release.md moves it).
OLDER_BUILD = "2632e04d"

NUM_REQUESTS = int(os.environ.get("KVPIPE_UPGRADE_REQUESTS", "0"))
NUM_CLIENTS = 4
# 32 MiB of KV each.
SMALL = ("--num-gpu-blocks-override", "256")
DRAIN = ("--shutdown-timeout", "45")
BODIES = [completion(prompt(length, seed=400), max_tokens=16, ignore_eos=True) for length in (40, 97, 130, 256, 333)]
# Handoffs from old to new, and from new to old, that the half of an upgrade waits for.
NUM_MIXED = 3
STOP_S = 90
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


@dataclass
class Load:
    """Clients that send one request after the other to the proxy whose address they have at that time."""

    url: str
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
            outcome = self._answer(BODIES[which] | {"cache_salt": str(number), "stream": number % 2 == 1})
            with self._lock:
                self.num_answered += 1
                if outcome != self.expected[which]:
                    self.wrong.append(f"request {number}: {outcome}")

    def _answer(self, body: dict[str, object]) -> str:
        try:
            with post(self.url, COMPLETIONS, body) as response:
                payload = response.read()
            if response.status != 200:
                return f"{response.status} {payload.decode()}"
            return streamed_text(payload) if body["stream"] else text_of(json.loads(payload))
        except (OSError, AssertionError, LookupError) as error:
            return repr(error)


class Upgrade:
    """The deployment, whose processes are replaced one by one."""

    def __init__(self, running: DeploymentThread, old: Path, zygotes: dict[bool, Zygote], watchdog: Watchdog) -> None:
        self._running = running
        self._deployment: Deployment = running.deployment
        self._old, self._zygotes, self._watchdog = old, zygotes, watchdog
        self.proxy = self._deployment.proxy.child
        self.url = self._deployment.url
        self.is_new: set[str] = set()

    def prepare(self, instance: Instance, tokens: Tokens, *, is_new: bool) -> None:
        """Has the next start of an instance run this build or the old one."""
        child = instance.child
        command = self._zygotes[is_new].command()
        child.command = (*command, *child.command[len(command) :])
        self._set_env(child, tokens, is_new=is_new)

    def _set_env(self, child: ChildProcess, tokens: Tokens, *, is_new: bool) -> None:
        child.env.pop("KVPIPE_TOKEN_NEXT", None)
        folders = [str(REPOSITORY / "python"), str(REPOSITORY)] if is_new else [str(self._old), str(REPOSITORY)]
        child.env |= tokens.env() | {"PYTHONPATH": os.pathsep.join(folders)}

    def is_old(self, child: ChildProcess) -> bool:
        """True if a process has loaded the extension of the old build; false if that of this build."""
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in group_members(child.pid) if is_alive(pid))
        loaded = set(re.findall(r"/\S+/_kvpipe\.abi3\.so", maps))
        assert len(loaded) == 1, loaded
        return loaded == {str(self._old / "kvpipe" / "_kvpipe.abi3.so")}

    def replace(self, instance: Instance, tokens: Tokens) -> None:
        """Drains an instance, and starts this build of it at the same address."""
        child = instance.child
        self._end(child)
        self.prepare(instance, tokens, is_new=True)
        self._running.call(child.start())
        self._running.call(self._deployment.until_healthy([instance]))
        self.is_new.add(instance.url)
        assert not self.is_old(child)

    def replace_proxy(self, load: Load, tokens: Tokens) -> None:
        """Starts a proxy beside the present one, moves the traffic there, and drains the other."""
        before = self.proxy
        port = str(free_ports(1)[0])
        command = list(before.command)
        command[command.index("--port") + 1] = port
        log = LOGS / "upgrade" / f"proxy-{port}.log"
        self.proxy = ChildProcess("proxy", command, before.env, watchdog=self._watchdog, log_path=log)
        self._set_env(self.proxy, tokens, is_new=True)
        self._running.call(self.proxy.start())
        self.url = f"http://127.0.0.1:{port}"
        until(self._is_healthy)
        load.url = self.url
        self._end(before)
        assert before.returncode == 0
        assert not self.is_old(self.proxy)

    def _is_healthy(self) -> bool:
        try:
            return json.loads(get(self.url, "/health"))["status"] == "ok"
        except OSError:
            return False

    def _end(self, child: ChildProcess) -> None:
        child.send_signal(signal.SIGTERM)
        self._running.call(asyncio.wait_for(child.wait(), STOP_S))
        self._running.call(child.stop(0))

    def end(self) -> None:
        """Ends the proxy that the deployment does not know."""
        self._running.call(self.proxy.stop(15))

    def mixed_results(self) -> dict[tuple[bool, bool], Counter[str]]:
        """Results of handoffs between different builds since the last replacement, by which of P and D is new."""
        results: dict[tuple[bool, bool], Counter[str]] = {(False, True): Counter(), (True, False): Counter()}
        begin = self.proxy.log_path.stat().st_size

        def has_enough() -> bool:
            with self.proxy.log_path.open() as log:
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


def is_alive(pid: int) -> bool:
    """True if a process has not ended."""
    return Path(f"/proc/{pid}/maps").exists()


@pytest.fixture(scope="module")
def older_build() -> Path:
    """The folder of the older build, which `scripts/build-of` makes once; that takes minutes of CPU time."""
    command = ["git", "-C", str(REPOSITORY), "cat-file", "-e", f"{OLDER_BUILD}^{{commit}}"]
    if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip(f"the older build {OLDER_BUILD} is not in this clone: git fetch --unshallow --tags")
    commit = subprocess.check_output(
        ["git", "-C", str(REPOSITORY), "rev-parse", f"{OLDER_BUILD}^{{commit}}"], text=True
    )
    folder = REPOSITORY / ".cache" / "builds" / commit.strip()
    if not folder.exists():
        pytest.skip(f"the older build is not made: scripts/build-of {OLDER_BUILD}")
    return folder


@pytest.fixture
def upgrade(groups: Groups, zygote: Zygote, older_build: Path) -> Iterator[Upgrade]:
    """Two P, two D and their proxy, all of the older build."""
    groups.end()
    spec = DeploymentSpec(
        model=tiny_model(),
        num_prefill=2,
        num_decode=2,
        block_size=32,
        server_command=zygote.command(),
        connector_config={"lease_s": LEASE_S},
        vllm_args=(*COMMON, *ROOMY, *SMALL, *DRAIN),
        log_dir=LOGS / "upgrade",
    )
    path = os.pathsep.join([str(older_build), str(REPOSITORY)])
    with (
        pytest.MonkeyPatch.context() as patch,
        Zygote(env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, log=LOGS / "zygote-older.log") as older,
    ):
        patch.setenv("OMP_NUM_THREADS", "1")
        running = DeploymentThread(spec, report=print)
        watchdog = Watchdog()
        upgrade = Upgrade(running, older_build, {False: older, True: zygote}, watchdog)
        for instance in running.deployment.instances:
            upgrade.prepare(instance, BEFORE, is_new=False)
        upgrade._set_env(upgrade.proxy, BEFORE, is_new=False)
        with running:
            try:
                yield upgrade
            finally:
                upgrade.end()
                running.call(watchdog.close())


def shares_protocol() -> bool:
    """True if both builds speak one version of the protocol."""
    path = "rust/core/src/net/version.rs"
    older = subprocess.run(["git", "show", f"{OLDER_BUILD}:{path}"], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
    number = re.compile(rb"PROTOCOL_VERSION: u16 = (\d+)")
    return number.findall(older.stdout) == number.findall((REPOSITORY / path).read_bytes())


def test_a_rolling_upgrade_with_a_new_token_loses_no_request(upgrade: Upgrade) -> None:
    (first_p, second_p), (first_d, second_d) = upgrade._deployment.prefill, upgrade._deployment.decode
    assert all(upgrade.is_old(each.child) for each in upgrade._deployment.processes)
    alone = Load(first_d.url, [])
    load = Load(upgrade.url, [alone._answer(body | {"stream": False}) for body in BODIES])
    began = time.monotonic()
    with load.running():
        for number, tokens in enumerate(STEPS):
            upgrade.replace_proxy(load, tokens)
            upgrade.replace(first_p, tokens)
            upgrade.replace(first_d, tokens)
            if number == 0:
                results = upgrade.mixed_results()
            upgrade.replace(second_p, tokens)
            upgrade.replace(second_d, tokens)
    print(f"{load.num_answered} requests, {len(load.wrong)} lost, {time.monotonic() - began:.0f} s, mixed: {results}")
    assert load.wrong == []
    for counts in results.values():
        assert ("full" in counts) == shares_protocol()
