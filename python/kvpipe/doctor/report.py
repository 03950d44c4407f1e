"""Facts and findings for people, and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvpipe import __version__
from kvpipe.doctor.findings import field_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpipe.doctor.facts import Facts, Failure, InstanceFacts, PairFacts, WorkerFacts
    from kvpipe.doctor.findings import Finding


def is_healthy(findings: Sequence[Finding]) -> bool:
    """True if nothing is wrong."""
    return all(finding.level != "problem" for finding in findings)


def document(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns everything as one object; its keys are in docs/guide/doctor.md."""
    return {
        "ok": is_healthy(findings),
        "kvpipe": __version__,
        "instances": [_instance_document(instance) for instance in facts.instances],
        "pairs": [_pair_document(pair) for pair in facts.pairs],
        "findings": [asdict(finding) for finding in findings],
    }


def _instance_document(instance: InstanceFacts) -> dict[str, Any]:
    http = instance.http
    return {
        "control": instance.target.control,
        "url": instance.target.url,
        "failure": _failure_document(instance.failure),
        "description": instance.description,
        "workers": [asdict(worker) for worker in instance.workers],
        "http": None if http is None else asdict(http),
    }


def _pair_document(pair: PairFacts) -> dict[str, Any]:
    return {
        "producer": pair.producer.name,
        "consumer": pair.consumer.name,
        "refusal": pair.refusal,
        "handoff": pair.handoff,
        "failure": pair.failure,
        "skipped": pair.skipped,
    }


def _failure_document(failure: Failure | None) -> dict[str, Any] | None:
    return None if failure is None else asdict(failure)


def text(facts: Facts, findings: Sequence[Finding]) -> str:
    """Returns everything as lines for people."""
    described = [instance for instance in facts.instances if instance.description]
    lines: list[str] = []
    for instance in facts.instances:
        lines += _instance_lines(instance)
    if described:
        lines += ["", "fingerprint", *_fingerprint_lines(described)]
    if facts.pairs:
        lines += ["", "pairs", *(f"  {pair.name}: {_pair_line(pair)}" for pair in facts.pairs)]
    lines += ["", *_finding_lines(facts, findings)]
    return "\n".join(map(_printable, lines))


def _printable(line: str) -> str:
    """Instances' texts move no cursor."""
    return "".join(each if each.isprintable() else " " for each in line)


def _instance_lines(instance: InstanceFacts) -> Iterator[str]:
    description = instance.description
    yield f"instance {instance.name} {instance.target.url}".rstrip()
    if not description:
        yield f"  {'not described' if instance.failure is None else instance.failure.text}"
    else:
        versions = description.get("versions", {})
        shown = ", ".join(f"{name} {versions.get(name, 'unknown')}" for name in ("kvpipe", "vllm"))
        yield f"  {description.get('role')}, {shown}, engine {description.get('engine_id')}"
    yield from (f"  rank {rank} {_worker_line(worker)}" for rank, worker in enumerate(instance.workers))
    if (http := instance.http) is not None:
        yield f"  model {http.model}" if http.failure is None else f"  {http.failure.text}"
        if http.clock_offset_s is not None:
            offset = round(http.clock_offset_s, 1) + 0.0  # no -0.0
            yield f"  clock {offset:+} s from this host's, to within {http.clock_uncertainty_s:.1f} s"


def _worker_line(worker: WorkerFacts) -> str:
    if worker.failure is not None:
        return f"{worker.address}: {worker.failure.text}"
    facts = [f"{worker.transport} from here"]
    if machine := worker.machine:
        facts += [
            f"host {str(machine.get('host'))[:8]}",
            f"user {machine.get('user')}",
            "RDMA devices" if machine.get("rdma_devices") else "no RDMA devices",
        ]
    return f"{worker.address}: {', '.join(facts)}"


def _fingerprint_lines(described: list[InstanceFacts]) -> Iterator[str]:
    names = field_names(described)
    width = max(map(len, names), default=0)
    for name in names:
        values = [instance.fingerprint.get(name, "(absent)") for instance in described]
        shown = values[0] if len(set(values)) == 1 else " | ".join(values) + "  differs"
        yield f"  {name:{width}}  {shown}"


def _pair_line(pair: PairFacts) -> str:
    if pair.refusal:
        return f"refused: {pair.refusal}"
    if pair.failure:
        return f"accepted; test handoff failed: {pair.failure}"
    if pair.skipped:
        return f"accepted; {pair.skipped}"
    if (result := pair.handoff) is None:
        return "accepted; no test handoff without the URLs of both"
    carried = f"{result['bytes']} bytes over {result['transport'] or 'nothing'} in {result['transfer_ms']:.1f} ms"
    return f"accepted; test handoff {result['result']}, {carried}"


def _finding_lines(facts: Facts, findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.level}: {finding.problem}"
        yield f"  remedy: {finding.remedy}"
    if not is_healthy(findings):
        return
    num_untested = sum(pair.handoff is None for pair in facts.pairs)
    if num_untested:
        yield (
            f"no problem was found, but data paths of {num_untested} of {len(facts.pairs)} pairs were not tested, "
            "which needs the URLs of both instances (docs/guide/doctor.md, Test handoffs)"
        )
    else:
        yield "nothing is wrong"
