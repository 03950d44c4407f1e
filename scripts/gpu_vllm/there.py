"""Runs the steps on a machine with a GPU: `gpu-check --vllm`.

A step is a program of its own with a bound, begun as soon as those that it needs have ended, many at once. Where all of
those have failed it is left out. Their logs are gathered all the time, so that they are there when this is killed.
"""

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from gpu_vllm import packing, report

HERE = Path(__file__).resolve().parent
# Of all files that come back, each may have 16 MiB.
_LOG_BYTES, _ERROR_LINES = 1 << 19, 24
_GATHER_EVERY_S, _END_WITHIN_S, _WARM_WITHIN_S = 5.0, 6.0, 60.0
PROBE_LOG, INSTANCES_LOG, CONSOLE_LOG, RESULT, TRACE = (
    "probe.log",
    "instances.log",
    "console.log",
    "result.json",
    "trace.json",
)

_WARM = "import torch, transformers; torch.zeros(1, device='cuda')"
_MODELS = """
import pathlib, sys
from gpu_vllm.groups import SHAPE_FIELDS
from bench.instances.model import write_model
from tiny_model import make_tiny_model
folder = pathlib.Path(sys.argv[1])
make_tiny_model(folder / "tiny")
write_model(folder / "shape", int(sys.argv[2]), **SHAPE_FIELDS)
"""


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        name: Its name; a step's own group of instances has the same.
        module: The program.
        bound_s: How long it may take.
        needs: Steps that come first; one of them has to have started its engines.
        weight: How many engines it starts.
        is_alone: True if nothing else may run meanwhile, because it measures. Such a step comes last.
        instead_of: A step in whose place it runs; it is left out where that one has measured.
    """

    name: str
    module: str
    bound_s: float
    needs: tuple[str, ...] = ()
    weight: int = 3
    is_alone: bool = False
    instead_of: str = ""


def steps() -> list[Step]:
    """The steps in the order in which they begin."""
    engines = {f"engine {name}": name for name in ("bfloat16-v1", "bfloat16-v2", "float32-v1", "float32-v2")}
    found = [Step("probe", "probe", 120, weight=1)]
    found += [Step(name, "engine", 150, weight=1) for name in engines]
    found += [Step(name, "answers", 200) for name in ("bfloat16-v2", "bfloat16-v1")]
    found += [
        Step("float32-v2", "answers", 280, ("engine float32-v2", "bfloat16-v2")),
        Step("float32-v1", "answers", 200, ("engine float32-v1", "bfloat16-v1")),
        Step("full-graphs", "answers", 200, ("engine float32-v2", "bfloat16-v2")),
        Step("piecewise-graphs", "answers", 220, ("engine float32-v2", "bfloat16-v2")),
        Step("default-graphs", "answers", 220, ("engine bfloat16-v2", "bfloat16-v2")),
        Step("shape", "shape", 220, ("bfloat16-v2", "default-graphs"), is_alone=True),
        Step("shape-eager", "shape", 150, ("bfloat16-v2", "default-graphs"), is_alone=True, instead_of="shape"),
    ]
    return found


@dataclass
class Run:
    """A step that was begun, or left out."""

    step: Step
    outcome: str = "running"
    seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)
    process: subprocess.Popen[bytes] | None = None
    has_started: bool = False
    findings: dict[str, Any] = field(default_factory=dict)


class Check:
    """All steps, their processes, logs and findings.

    Args:
        out: Folder of the files that come back.
        within_s: After it nothing runs.
        chosen: Names of steps, or their beginnings; empty means all.
        site: Where to unpack, for another run to find it; None unpacks into a folder that is removed.
        on_cpu: True if vLLM's CPU build stands in.
    """

    def __init__(self, out: Path, within_s: float, chosen: Sequence[str], *, site: Path | None, on_cpu: bool) -> None:
        self.began = time.monotonic()
        self.out, self.within_s, self.on_cpu = out, within_s, on_cpu
        self.steps = [step for step in steps() if not chosen or step.name.startswith(tuple(chosen))]
        out.mkdir(parents=True, exist_ok=True)
        for name in (PROBE_LOG, INSTANCES_LOG, CONSOLE_LOG, RESULT, TRACE, report.TABLE, report.PICTURE):
            (out / name).unlink(missing_ok=True)  # of an earlier run, which may be of another commit
        self.work = Path(tempfile.mkdtemp(prefix="gpu-check-"))
        self.site = self.work / "site" if site is None else site.resolve()
        self.logs = self.work / "logs"
        self.logs.mkdir()
        self.runs: dict[str, Run] = {}
        self.facts: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count()}
        self._console: TextIO = (out / CONSOLE_LOG).open("w", buffering=1)
        self._is_over = threading.Event()

    def say(self, text: str) -> None:
        """Prints lines of progress with the seconds since the start."""
        line = f"{time.monotonic() - self.began:6.1f} {text}"
        print(line, flush=True)
        self._console.write(line + "\n")

    def run(self) -> int:
        """Unpacks, runs all steps, and reports; returns the exit status."""
        gathering = threading.Thread(target=self._gather_often, daemon=True)
        gathering.start()
        with _ended_in_order():
            try:
                variables = self._prepared()
                self._all_steps(variables)
            except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - the logs must come back
                self.say(f"stopped: {type(error).__name__}: {error}")
                self.facts["stopped"] = f"{type(error).__name__}: {error}"
            for each in self.runs.values():
                self._end(each, "stopped")
            self._is_over.set()
            gathering.join()
            self._gather()
            return self._report()

    def close(self) -> None:
        """Closes the log and removes what is not brought back."""
        self._console.close()
        shutil.rmtree(self.work, ignore_errors=True)

    # --- before the steps ---------------------------------------------------------------------------------------

    def _prepared(self) -> dict[str, str]:
        """Unpacks the archive where there is one, makes the models; returns the variables of all steps."""
        variables = os.environ | {"PYTHONUNBUFFERED": "1", "GPU_CHECK": "1"}
        paths = [str(HERE.parent), variables.get("PYTHONPATH", "")]
        archive = HERE.parent / packing.ARCHIVE
        if archive.exists():
            self.facts |= json.loads((HERE.parent / packing.FACTS).read_text())
            # torch's libraries are gigabytes, which are read from the disk meanwhile.
            with subprocess.Popen([sys.executable, "-c", _WARM]) as warm:  # noqa: S603 - the line above
                if not self.site.exists():
                    self._unpack(archive)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    warm.wait(_WARM_WITHIN_S)
                warm.kill()
            self.say("torch read")
            paths.insert(0, str(self.site))
        else:
            self.facts["commit"] = packing.commit()
            paths[:0] = [str(packing.ROOT / "examples/disagg_prefill"), str(packing.ROOT)]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            variables[name] = str(self.work / name.lower())
        log = self.logs / "models.log"
        with log.open("wb") as file:
            made = subprocess.run(  # noqa: S603 - the line above
                [sys.executable, "-c", _MODELS, str(self.work), "2" if self.on_cpu else "16"],
                env=variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=120,
            )
        if made.returncode != 0:
            self._show(log)
            raise RuntimeError("the models could not be made")
        self.say("models made")
        return variables

    def _unpack(self, archive: Path) -> None:
        """Unpacks the archive; the folder appears whole."""
        scratch = self.site.with_suffix(".new")
        packing.unpack(archive, scratch)
        self.say("unpacked")
        options = ["-m", "compileall", "-q", "-j", "0", "-s", str(scratch), str(scratch)]
        subprocess.run([sys.executable, *options], check=False, stdout=subprocess.DEVNULL, timeout=60)  # noqa: S603
        self.say("compiled to bytecode")
        scratch.rename(self.site)

    # --- the steps ----------------------------------------------------------------------------------------------

    def _all_steps(self, variables: Mapping[str, str]) -> None:
        room = max(3, os.cpu_count() or 1) if not self.on_cpu else 3
        while True:
            for each in self.runs.values():
                self._look(each)
            left = [step for step in self.steps if step.name not in self.runs]
            running = [each.step for each in self.runs.values() if each.outcome == "running"]
            if not left and not running:
                return
            if time.monotonic() - self.began > self.within_s:
                self.say(f"{self.within_s:.0f} s have passed: {len(running)} steps ended, {len(left)} left out")
                return
            for step in left:
                used = sum(each.weight for each in running)
                if not self._may_begin(step, running) or (used + step.weight > room and running):
                    continue
                self._begin(step, variables)
                running.append(step)
            time.sleep(0.1)

    def _may_begin(self, step: Step, running: Sequence[Step]) -> bool:
        """True if a step may begin now. One whose needs have all failed is left out."""
        if any(each.is_alone for each in running):
            return False
        others = [each.name for each in self.steps if not each.is_alone]
        if step.is_alone and (running or any(name not in self.runs for name in others)):
            return False
        if (first := self.runs.get(step.instead_of)) and first.findings.get("eight at once"):
            return self._leave_out(step, f"{step.instead_of} has measured")
        needs = [name for name in step.needs if any(each.name == name for each in self.steps)]
        ended = [self.runs[name] for name in needs if name in self.runs and self.runs[name].outcome != "running"]
        if not needs or any(each.has_started for each in ended):
            return True
        if len(ended) == len(needs):
            self._leave_out(step, f"none of {', '.join(needs)} has started")
        return False

    def _leave_out(self, step: Step, reason: str) -> bool:
        self.runs[step.name] = Run(step, f"left out: {reason}")
        self.say(f"{step.name}: left out: {reason}")
        return False

    def _begin(self, step: Step, variables: Mapping[str, str]) -> None:
        folder = self._folder(step)
        folder.mkdir()
        command = [sys.executable, "-m", f"gpu_vllm.{step.module}"]
        if step.module != "probe":
            command += [step.name.removeprefix("engine "), *(["--cpu"] if self.on_cpu else [])]
            command += ["--model", str(self.work / ("shape" if step.module == "shape" else "tiny"))]
        if step.module in {"answers", "shape"}:
            command += ["--logs", str(folder)]
        if step.module == "shape":
            command += ["--trace", str(folder / TRACE)]
        command += ["--json", str(self._json(step))]
        with (folder / "step.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own programs
                command, env=variables, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, process_group=0
            )
        self.runs[step.name] = Run(step, process=process)
        self.say(f"{step.name}: begun")

    def _look(self, each: Run) -> None:
        """Notes the end of a step, or ends it when its bound has passed."""
        if each.outcome != "running" or each.process is None:
            return
        if each.process.poll() is not None:
            self._end(each, "passed" if each.process.returncode == 0 else "failed")
        elif time.monotonic() - each.began > each.step.bound_s:
            self._end(each, f"failed: over its {each.step.bound_s:.0f} s")

    def _end(self, each: Run, outcome: str) -> None:
        if each.outcome != "running" or each.process is None:
            return
        if each.process.poll() is None:
            # kvpipe's deployment ends its instances when it is interrupted, and its watchdog does when it is killed.
            os.killpg(each.process.pid, signal.SIGINT)
            try:
                each.process.wait(_END_WITHIN_S)
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
        with contextlib.suppress(ProcessLookupError):  # a proxy of a step that has crashed
            os.killpg(each.process.pid, signal.SIGKILL)
        each.outcome, each.seconds = outcome, round(time.monotonic() - each.began, 1)
        each.findings = _read(self._json(each.step))
        each.has_started = outcome == "passed" or "start_s" in each.findings
        if each.step.module == "probe":
            self.facts |= each.findings.get("machine", {})
        self.say(f"{each.step.name}: {outcome} after {each.seconds} s")
        for wrong in each.findings.get("wrong", []):
            self.say(f"  wrong: {wrong[:700]}")
        if outcome != "passed":
            own = self._folder(each.step) / "step.log"
            others = [log for log in sorted(own.parent.glob("*.log")) if log != own and _has_error(log)]
            for log in (own, *others[:1]):
                self._show(log)

    def _show(self, log: Path) -> None:
        """Prints what matters of a log: its errors, and its last lines."""
        lines = log.read_text(errors="replace").splitlines()
        for line in essential(lines):
            self.say(f"  [{log.parent.name}/{log.stem}] {line[:200]}")

    # --- what comes back ----------------------------------------------------------------------------------------

    def _folder(self, step: Step) -> Path:
        return self.logs / step.name.replace(" ", "-")

    def _json(self, step: Step) -> Path:
        return self._folder(step) / "found.json"

    def _gather_often(self) -> None:
        while not self._is_over.wait(_GATHER_EVERY_S):
            self._gather()

    def _gather(self) -> None:
        """Writes the logs that are there into two files, and the newest trace."""
        probes = [self.logs / "models.log", *self.logs.glob("probe/*.log"), *self.logs.glob("engine*/*.log")]
        others = [log for log in sorted(self.logs.glob("*/*.log")) if log not in probes]
        for name, logs in ((PROBE_LOG, probes), (INSTANCES_LOG, others)):
            with (self.out / name).open("wb") as file:
                for log in logs:
                    if log.exists():
                        file.write(f"\n===== {log.relative_to(self.logs)}\n".encode())
                        file.write(_end_of(log))
        for trace in self.logs.glob(f"shape/{TRACE}"):
            if trace.stat().st_size < 15 << 20:
                shutil.copy(trace, self.out / TRACE)
        (self.out / RESULT).write_text(json.dumps(self.result(), indent=1) + "\n")

    def result(self) -> dict[str, Any]:
        """All findings."""
        found = {
            name: {"outcome": each.outcome, "seconds": each.seconds, **(each.findings or _read(self._json(each.step)))}
            for name, each in list(self.runs.items())
        }
        facts = self.facts | {"seconds": round(time.monotonic() - self.began, 1)}
        return {"date": time.strftime("%Y-%m-%d", time.gmtime()), "facts": facts, "steps": found}

    def _report(self) -> int:
        result = self.result()
        for line in report.write(result, self.out):
            self.say(line)
        self.close()
        passed = [each.outcome == "passed" for each in self.runs.values()]
        return 0 if passed and all(passed) and "stopped" not in self.facts else 1


def essential(lines: Sequence[str]) -> list[str]:
    """Of a log: the end of its first and its last traceback, its first errors, its last lines."""
    chosen: set[int] = set()
    tracebacks = [at for at, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    for at in (*tracebacks[:1], *tracebacks[-1:]):
        end = next((to for to in range(at + 1, len(lines)) if _is_error(lines[to])), at)
        chosen |= set(range(max(at, end - 6), min(end + 3, len(lines))))
    errors = [at for at, line in enumerate(lines) if _is_error(line) and "Traceback" not in line]
    chosen |= set(errors[:8]) | set(range(max(0, len(lines) - 4), len(lines)))
    return [lines[at] for at in sorted(chosen)][:_ERROR_LINES]


def _has_error(log: Path) -> bool:
    return any(_is_error(line) for line in log.read_text(errors="replace").splitlines())


def _is_error(line: str) -> bool:
    words = (
        "Error:",
        "Error(",
        "error:",
        "Exception:",
        "RuntimeError",
        "assert ",
        "CUDA error",
        "Segmentation",
        "wrong:",
    )
    return any(word in line for word in words)


def _end_of(log: Path) -> bytes:
    data = log.read_bytes()
    return data if len(data) <= _LOG_BYTES else data[: _LOG_BYTES // 4] + b"\n...\n" + data[-3 * _LOG_BYTES // 4 :]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


class _ended_in_order:  # noqa: N801 - it reads as a phrase
    """Inside the block SIGTERM raises KeyboardInterrupt, as SIGINT does; a second one interrupts nothing."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, _interrupt)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
