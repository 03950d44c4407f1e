"""Conclusions: what is wrong with a deployment, and the remedy. Pure functions of the facts."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from kvpipe import _kvpipe
from kvpipe.doctor.facts import Failure, FailureKind, InstanceFacts, PairFacts, WorkerFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvpipe.doctor.facts import Facts

# Nothing of kvpipe compares clocks of hosts; lines of their logs cannot be joined where these differ by more.
_CLOCK_BOUND_S = 5.0
_ABSENT = "(absent)"
# The reason of a data path that blames RDMA devices begins so, see rust/core/src/transport/data_path.rs.
_RDMA_REASON = "this machine has RDMA devices"
_PAGE = "docs/guide/troubleshooting.md"
_PORTS = "start the instance, or fix its address or the firewall (docs/guide/multi-host.md, Ports)"
_ADDRESS_REMEDY = (
    "set `listen` or `advertise` of the producer to an address that the consumer reaches, or open the port"
)
_REMEDIES = {
    FailureKind.TOKEN: "give all instances and kvpipe doctor the same KVPIPE_TOKEN, or KVPIPE_TOKEN_FILE",
    FailureKind.RELEASE: "run the same release of kvpipe everywhere, and give doctor control ports (`listen`)",
    FailureKind.PORT: _PORTS,
    FailureKind.SILENT: "look at the process: it is stopped (kill -CONT resumes it), hangs, or is no kvpipe instance",
    FailureKind.NAME: "fix the name, or the resolver of this host (DNS, /etc/hosts)",
    FailureKind.UNREACHED: "a firewall drops packets, the host is down, or no route leads there: open the port, or fix "
    "the address",
    FailureKind.ERROR: "see the log of the instance",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        level: `problem`: handoffs fail, or are slow. `note`: handoffs are as they should be.
        kind: Its kind, see docs/guide/doctor.md.
        instances: Control ports of the instances that it is about.
        problem: What is wrong.
        remedy: What fixes it.
    """

    level: Literal["problem", "note"]
    kind: str
    instances: tuple[str, ...]
    problem: str
    remedy: str


def find(facts: Facts) -> list[Finding]:
    """Returns what is wrong, in the order in which it should be fixed."""
    described = [instance for instance in facts.instances if instance.description]
    parts: Iterable[Iterable[Finding]] = (
        chain.from_iterable(map(_of_instance, facts.instances)),
        _of_roles(described),
        _of_fingerprints(described),
        chain.from_iterable(map(_of_pair, facts.pairs)),
        _of_skipped(facts.pairs),
        _of_versions(described),
        _of_hash_seeds(described),
    )
    found = list(chain.from_iterable(parts))
    return [each for level in ("problem", "note") for each in found if each.level == level]


def _of_failure(failure: Failure, names: tuple[str, ...], what: str = "") -> Finding:
    remedy = _REMEDIES[failure.kind]
    return Finding("problem", str(failure.kind), names, f"{what}{failure.text}", remedy)


def _of_instance(instance: InstanceFacts) -> Iterator[Finding]:
    names = (instance.name,)
    if instance.failure is not None:
        yield _of_failure(instance.failure, names)
    elif not instance.description:
        problem = f"{instance.name} has not started yet: its workers have not reported"
        yield Finding("problem", "starting", names, problem, "wait, or see its log")
    for rank, worker in enumerate(instance.workers):
        yield from _of_worker(instance, rank, worker)
    if instance.http is not None:
        if instance.http.failure is not None:
            yield _of_failure(instance.http.failure, names)
        yield from _of_clock(instance)


def _of_worker(instance: InstanceFacts, rank: int, worker: WorkerFacts) -> Iterator[Finding]:
    names, what = (instance.name,), f"rank {rank} of {instance.name}"
    if worker.failure is not None:
        yield _of_failure(worker.failure, names, f"{what}: ")
    elif worker.transport_reason and not _wants_rdma_of(worker.transport_reason, [worker]):
        problem = f"this process would read {what} over {worker.transport}: {worker.transport_reason}"
        remedy = f"none for kvpipe doctor; instances that run as this process does need what the reason names ({_PAGE})"
        yield Finding("note", "data path from here", names, problem, remedy)
    if worker.machine.get("rdma_devices") and worker.machine.get("data_path") == "tcp":
        problem = f"{what} has RDMA devices, and KVPIPE_DATA_PATH=tcp leaves them out"
        yield Finding("problem", "data path", names, problem, "take KVPIPE_DATA_PATH out of its environment")


def _of_clock(instance: InstanceFacts) -> Iterator[Finding]:
    http = instance.http
    if http is None or http.clock_offset_s is None:
        return
    offset = http.clock_offset_s
    if abs(offset) - http.clock_uncertainty_s > _CLOCK_BOUND_S:
        side = "ahead of" if offset > 0 else "behind"
        problem = f"the clock of {instance.name} is {abs(offset):.0f} s {side} this host's"
        remedy = "synchronize clocks (NTP): nothing of kvpipe compares them, but readers of several hosts' logs do"
        yield Finding("note", "clock", (instance.name,), problem, remedy)


def _of_roles(described: list[InstanceFacts]) -> Iterator[Finding]:
    if len(described) < 2:  # noqa: PLR2004 - one has no partner
        return
    names = tuple(instance.name for instance in described)
    for has_one, role, verb in (
        (any(each.is_producer for each in described), "kv_producer", "sends"),
        (any(each.is_consumer for each in described), "kv_consumer", "receives"),
    ):
        if not has_one:
            remedy = f'start one with "kv_role": "{role}", or "kv_both"'
            yield Finding("problem", "role", names, f"none of these instances {verb} KV", remedy)


def _of_fingerprints(described: list[InstanceFacts]) -> Iterator[Finding]:
    for name in field_names(described):
        values = _grouped((each, each.fingerprint.get(name, _ABSENT)) for each in described)
        if len(values) > 1:
            ours, theirs, *_ = values
            remedy = _kvpipe.remedy_of_difference(name, ours, theirs) or f"start all with the same {name}"
            yield Finding("problem", "fingerprint", _names(described), _difference(name, values), remedy)


def field_names(described: list[InstanceFacts]) -> list[str]:
    """Returns the fields of all fingerprints, in the order of comparison: a difference is named by its cause."""
    return list(dict.fromkeys(chain.from_iterable(each.fingerprint for each in described)))


def _of_pair(pair: PairFacts) -> Iterator[Finding]:
    names = (pair.producer.name, pair.consumer.name)
    if not pair.is_reached:
        problem = f"{pair.consumer.name} does not reach {pair.address}, which {pair.producer.name} advertises: "
        yield Finding("problem", "address", names, problem + pair.refusal, _ADDRESS_REMEDY)
    elif pair.refusal and not _is_explained(pair):
        problem = f"{pair.consumer.name} refuses KV of {pair.producer.name}: {pair.refusal}"
        yield Finding("problem", "pair", names, problem, f"see the message in {_PAGE}, Peers that refuse each other")
    else:
        yield from _of_loopback(pair)
    if pair.failure:
        yield Finding("problem", "handoff", names, f"test handoff {pair.name}: {pair.failure}", "see both logs")
    if (result := pair.handoff) is None:
        return
    if result["result"] != "full":
        problem = f"test handoff {pair.name} is {result['result']}: {result['reason'] or 'no reason is known'}"
        yield Finding("problem", "handoff", names, problem, f"see the reason in {_PAGE}, Reasons in results")
    reason = result.get("transport_reason")
    if reason and not _wants_rdma_of(reason, pair.producer.workers):
        problem = f"KV of {pair.producer.name} reaches {pair.consumer.name} over {result['transport']}: {reason}"
        remedy = f"do what the reason names, on the host of {pair.consumer.name}; {_PAGE} has more"
        yield Finding("problem", "data path", names, problem, remedy)


def _of_loopback(pair: PairFacts) -> Iterator[Finding]:
    """A loopback address that is advertised to another host, where something else listens at it."""
    address = pair.address
    ours, theirs = (_hosts(side) for side in (pair.producer, pair.consumer))
    if _is_loopback(address) and ours and theirs and ours.isdisjoint(theirs):
        problem = f"{pair.producer.name} advertises {address} to {pair.consumer.name}, which is on another host"
        yield Finding("problem", "address", (pair.producer.name, pair.consumer.name), problem, _ADDRESS_REMEDY)


def _is_explained(pair: PairFacts) -> bool:
    """True if the refusal is that of a field of the fingerprint, which has a finding of its own."""
    ours, theirs = pair.consumer.fingerprint, pair.producer.fingerprint
    differing = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    return any(f": {name} is " in pair.refusal for name in differing)


def _wants_rdma_of(reason: str, workers: list[WorkerFacts]) -> bool:
    """True if a data path's reason is the RDMA devices of the reading side, and the machines of the other have none."""
    has_none = bool(workers) and all(worker.machine.get("rdma_devices") is False for worker in workers)
    return has_none and reason.startswith(_RDMA_REASON)


def _of_skipped(pairs: list[PairFacts]) -> Iterator[Finding]:
    skipped = [pair for pair in pairs if pair.skipped]
    if skipped:
        problem = f"{len(skipped)} of {len(pairs)} pairs had no complete test handoff; {skipped[0].skipped}"
        names = tuple(dict.fromkeys(name for pair in skipped for name in (pair.producer.name, pair.consumer.name)))
        yield Finding("note", "skipped", names, problem, "fix the other problems, then give fewer instances at a time")


def _of_versions(described: list[InstanceFacts]) -> Iterator[Finding]:
    for name, package in (("kvpipe", "kvpipe"), ("vllm", "vLLM")):
        values = _grouped((each, each.description.get("versions", {}).get(name, "unknown")) for each in described)
        if len(values) > 1:
            problem = _difference(f"version of {package}", values)
            remedy = "none while they accept each other; finish the upgrade"
            yield Finding("note", "version", _names(described), problem, remedy)


def _of_hash_seeds(described: list[InstanceFacts]) -> Iterator[Finding]:
    """Seeds of vLLM's block hashes. Unset everywhere is vLLM's default, and nothing to report."""
    known = [each for each in described if "prefix_hash_seed" in each.description]
    values = _grouped((each, each.description["prefix_hash_seed"] or "random") for each in known)
    if len(values) > 1:
        remedy = (
            "handoffs and KVStoreConnector use hashes of their own; set the same PYTHONHASHSEED for all if a router or "
            "another store compares vLLM's block hashes"
        )
        yield Finding("note", "hash seed", _names(known), _difference("PYTHONHASHSEED", values), remedy)


def _grouped(values: Iterable[tuple[InstanceFacts, Any]]) -> dict[str, list[str]]:
    """Control ports by their value."""
    groups: dict[str, list[str]] = {}
    for each, value in values:
        groups.setdefault(str(value), []).append(each.name)
    return groups


def _difference(name: str, values: Mapping[str, list[str]]) -> str:
    return f"{name} differs: " + "; ".join(f"{value!r} at {', '.join(names)}" for value, names in values.items())


def _names(instances: Iterable[InstanceFacts]) -> tuple[str, ...]:
    return tuple(each.name for each in instances)


def _hosts(instance: InstanceFacts) -> set[str]:
    return {str(host) for worker in instance.workers if (host := worker.machine.get("host"))}


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
