"""`make test`, and by an argument `make test-slow` or `make test-vllm-versions`: parts side by side, each with a line.

Many tests wait: for time-outs, for servers that start. Other parts run meanwhile.
"""

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.deaths import EXPECTED_VARIABLE, KernelLog, has_events, unexpected

REPOSITORY = Path(__file__).parents[1]
LOGS = REPOSITORY / ".cache" / "test-logs"
OPTIONS = ("-v", "--color=no", "--durations=20", "-o", "console_output_style=count")
PYTEST = ("scripts/test", "python", *OPTIONS)
# Their tests start brokers and stores, and wait more than they compute.
QUEUE, STORES = "tests/amqp", "tests/store"
# Importing vLLM takes as long as a fifth of them.
CONNECTORS = "tests/vllm"
# Of the Python API: mostly processes that send to each other, two thirds of the time of all that is not named here.
PIPES = ("test_agent*", "test_deadlines", "test_faults", "test_lookup*", "test_pipe*", "test_tensor", "test_work")
E2E = "tests/e2e"
# Instances that start as users start them, and answers that take a whole processor.
E2E_LONG = ("test_bfloat16", "test_two_by_two")
# A front end that gets too little CPU time does not see in time that its broker has confirmed, and answers 503.
E2E_QUEUE = ("test_queue",)
# Supported versions of vLLM beside the installed one, and the test with instances of the oldest.
VLLM_VERSIONS, E2E_VERSIONS = ("0.30.0", "0.31.0", "0.33.0"), "test_vllm_versions"
# Those of the connectors' tests in which most of vLLM is real.
QUICK = (
    "tests/vllm/test_*.py",
    *(
        f"tests/vllm/handoff/test_{name}*.py"
        for name in ("scheduler", "connector", "worker", "invariants", "v2_runner")
    ),
    *(f"tests/vllm/handoff/test_{name}.py" for name in ("continuing", "engine_checks", "fingerprint", "first_token")),
    *(f"tests/vllm/store/test_{name}.py" for name in ("any_order", "engine", "weights")),
)
# Requests have limits, which ten engines beside other parts would exceed, and so would a broker's confirmations, for
# which a benchmark waits and does not try again.
CHAOS = ("tests/chaos", "tests/test_bench_queue_run.py")
# Benchmarks and builds, which take the other half of what is slow of the rest.
BENCH = ("test_bench*", "gpu_check/test_*", "test_gpu_check", "test_wheel")

# Intervals of a terminal's line, and of a log's.
TERMINAL_S, LOG_S = 0.5, 30.0
CLEAR_LINE = "\r\033[K"
# Between SIGTERM and SIGKILL.
GRACE_S = 10.0
# Start of a part's failures. The output before it does not explain them.
FAILURES = re.compile(r"^(=+ (FAILURES|ERRORS) =+|failures:|error(\[E\d+\])?:)", re.MULTILINE)
NUM_LAST_LINES = 60


@dataclass
class Part:
    """A command whose output goes to a log; one that is alone has no other part beside it."""

    name: str
    command: Sequence[str]
    is_alone: bool = False
    began: float = 0.0
    cpu_s: float = 0.0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, env: Mapping[str, str]) -> None:
        """Starts the command with these variables, too, in a process group of its own."""
        self.began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=REPOSITORY,
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def end(self) -> None:
        """Ends the command and what it started. vLLM's instances have groups of their own, and a watchdog."""
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)

    @property
    def log(self) -> Path:
        """File with its output."""
        return LOGS / f"{self.name}.log"

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.began

    def text(self) -> str:
        """Its output so far."""
        return self.log.read_text(errors="replace")

    def progress(self) -> str:
        """Its progress: pytest counts its tests; cargo names the crates that it compiles."""
        text = self.text()
        if counts := re.findall(r"\[ *(\d+/\d+)\]$", text, re.MULTILINE):
            return counts[-1]
        if num_done := len(re.findall(r"^test .* \.\.\. \w+$", text, re.MULTILINE)):
            return f"{num_done} tests"
        if found := re.search(r"^collected .* (\d+) selected", text, re.MULTILINE):
            return f"0/{found[1]}"
        return "compiling" if "Compiling" in text else "starting"

    def outcome(self) -> str:
        """Its counts of tests."""
        text = self.text()
        if found := re.findall(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", text, re.MULTILINE):
            passed, failed, ignored = (sum(map(int, column)) for column in zip(*found, strict=True))
            return f"{passed} passed, {failed} failed, {ignored} ignored"
        if found := re.findall(r"^=+ (.* in [\d.]+s.*) =+$", text, re.MULTILINE):
            return found[-1]
        return text.rstrip().rpartition("\n")[2]

    def skipped(self) -> Counter[str]:
        """Number of skipped tests by reason."""
        found = re.findall(r"^SKIPPED \[(\d+)\] [^:]+(?::\d+)?: (.*)$", self.text(), re.MULTILINE)
        return sum((Counter({reason: int(number)}) for number, reason in found), Counter())

    def failure(self) -> str:
        """The part of its output that says what failed."""
        text = self.text()
        if match := FAILURES.search(text):
            return text[match.start() :]
        return "\n".join(text.splitlines()[-NUM_LAST_LINES:])


def say(text: str) -> None:
    """Prints a line that stays."""
    print(f"{CLEAR_LINE if sys.stdout.isatty() else ''}test: {text}", flush=True)


def cpu_of_ended_s() -> float:
    """CPU time of all processes that this one has waited for, and of those that they have waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def has_ended(part: Part, failed: list[str]) -> bool:
    """True if a part that runs has ended; reports it then."""
    before = cpu_of_ended_s()
    status = None if part.process is None else part.process.poll()
    if status is None:
        return False
    part.cpu_s = cpu_of_ended_s() - before
    for line in re.findall(r"^deaths: .*", part.text(), re.MULTILINE):
        say(line)
    if status:
        failed.append(part.name)
        say(f"{part.name} FAILED after {part.seconds:.0f} s, all of its output is in {part.log}\n{part.failure()}")
    else:
        say(f"{part.name}: {part.outcome()} ({part.seconds:.0f} s, {part.cpu_s:.0f} s of CPU time)")
    return True


def show(running: Sequence[Part], began: float) -> None:
    """Prints the progress of the running parts."""
    line = f"{time.monotonic() - began:4.0f} s  {'   '.join(f'{part.name}: {part.progress()}' for part in running)}"
    if sys.stdout.isatty():
        print(CLEAR_LINE + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)
    else:
        say(line)


@contextlib.contextmanager
def ended(parts: Sequence[Part]) -> Iterator[None]:
    """Whatever ends this process ends the parts, too."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    try:
        yield
    finally:
        for part in parts:
            part.end()


def has_place(part: Part, running: Sequence[Part], num_lanes: int) -> bool:
    """True if a part may start beside those that run."""
    return not running or (len(running) < num_lanes and not (part.is_alone or running[0].is_alone))


def run(parts: Sequence[Part], num_lanes: int = 4) -> int:
    """Runs parts in their order, so many side by side. The number of parts that failed."""
    shutil.rmtree(LOGS / "instances", ignore_errors=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    began = shown = time.monotonic()
    waiting, running = list(parts), list[Part]()
    failed: list[str] = []
    interval_s = TERMINAL_S if sys.stdout.isatty() else LOG_S
    log = KernelLog()
    with tempfile.NamedTemporaryFile("r", prefix="kvpipe-deaths-") as expected, ended(parts):
        while waiting or running:
            while waiting and has_place(waiting[0], running, num_lanes):
                running.append(waiting.pop(0))
                running[-1].start({EXPECTED_VARIABLE: expected.name})
            running = [part for part in running if not has_ended(part, failed)]
            if time.monotonic() - shown >= interval_s:
                shown = time.monotonic()
                show(running, began)
            time.sleep(0.1)
        failed += map(str, unexpected(log.deaths(has_events=has_events()), expected.read()))
    for reason, number in sum((part.skipped() for part in parts), Counter[str]()).most_common():
        say(f"{number} skipped: {reason}")
    say(f"{'failed: ' + ', '.join(failed) if failed else 'all passed'}, {time.monotonic() - began:.0f} s in all")
    return len(failed)


def files_below(folder: str, *patterns: str) -> list[str]:
    """Files of tests in a folder."""
    paths = (path for pattern in patterns for path in (REPOSITORY / folder).glob(f"{pattern}.py"))
    return sorted(str(path.relative_to(REPOSITORY)) for path in paths)


def ignore(*paths: str) -> list[str]:
    """Arguments of pytest that leave these files and folders out."""
    return [f"--ignore={path}" for path in paths]


def parts_of(*, is_slow: bool) -> list[Part]:
    """The parts of `make test`, or of `make test-slow`. The longest first."""
    speed = ("-m", "slow" if is_slow else "not slow")
    e2e = ("scripts/test", "e2e", *OPTIONS, *speed)
    pipes = files_below("tests", *PIPES)
    bench = [path for path in files_below("tests", *BENCH) if path not in CHAOS]
    others = ignore(QUEUE, STORES, CONNECTORS, E2E, *pipes, *((*CHAOS, *bench) if is_slow else ()))
    rust = ("scripts/test", "rust", "--no-fail-fast")
    stores, python = Part("stores", (*PYTEST, *speed, STORES)), Part("python", (*PYTEST, *speed, *others))
    connectors, queue = Part("connectors", (*PYTEST, *speed, CONNECTORS)), Part("queue", (*PYTEST, *speed, QUEUE))
    pipe = Part("pipes", (*PYTEST, *speed, *pipes))
    if not is_slow:
        return [stores, connectors, Part("rust", rust), pipe, Part("e2e", e2e), python, queue]
    of_e2e = set(files_below(E2E, "test_*"))
    long, behind_broker = (set(files_below(E2E, *patterns)) for patterns in (E2E_LONG, E2E_QUEUE))
    return [
        Part("e2e", (*e2e, *ignore(*sorted(long | behind_broker)))),
        Part("bench", (*PYTEST, *speed, *bench)),
        Part("e2e-long", (*e2e, *ignore(*sorted(of_e2e - long)))),
        *(python, pipe, stores, connectors, queue),
        Part("rust", (*rust, "--", "--ignored")),
        Part("e2e-queue", (*e2e, *ignore(*sorted(of_e2e - behind_broker))), is_alone=True),
        Part("chaos", (*PYTEST, *speed, *CHAOS), is_alone=True),
    ]


def parts_of_versions(*, is_quick: bool) -> list[Part]:
    """The parts of `make test-vllm-versions`. The quick ones do without instances."""
    paths = [CONNECTORS]
    if is_quick:
        paths = sorted(str(path.relative_to(REPOSITORY)) for pattern in QUICK for path in REPOSITORY.glob(pattern))
    parts = [
        Part(f"vllm-{it}", ("scripts/test", "vllm", it, *OPTIONS, "-m", "not slow", *paths)) for it in VLLM_VERSIONS
    ]
    e2e = Part("e2e-vllm-versions", ("scripts/test", "e2e", *OPTIONS, "-k", E2E_VERSIONS), is_alone=True)
    return parts if is_quick else [*parts, e2e]


def main() -> int:
    """Runs the parts that the command line names."""
    if sys.argv[1:2] == ["vllm-versions"]:
        return run(parts_of_versions(is_quick=sys.argv[2:] == ["quick"]), num_lanes=2)
    return run(parts_of(is_slow=sys.argv[1:] == ["slow"]))


if __name__ == "__main__":
    sys.exit(main())
