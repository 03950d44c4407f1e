"""Reads what `KVPIPE_TRACE` wrote: the lives of handoffs, in seconds of `time.monotonic`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Event:
    """Something that happened to a handoff.

    Attributes:
        name: What.
        handoff: The handoff's id.
        process: Name of the process it happened in.
        began_s: When it began.
        ended_s: When it ended; the same for what took no time.
        facts: Numbers that say more.
    """

    name: str
    handoff: str
    process: str
    began_s: float
    ended_s: float
    facts: dict[str, int] = field(default_factory=dict)


def read(path: Path) -> list[Event]:
    """All events of a trace, by the time when they ended.

    Raises:
        ConfigError: The file cannot be read, or is no trace.
    """
    try:
        # the last line may be half written, the closing bracket is never there
        text = path.read_text().rpartition("\n")[0].removesuffix(",")
        lines: list[dict[str, Any]] = json.loads(f"{text}]")
    except (OSError, ValueError) as error:
        message = f"trace {path} cannot be read: {error}"
        raise ConfigError(message) from error
    names = {line["pid"]: line["args"]["name"] for line in lines if line["name"] == "process_name"}
    begun: dict[tuple[int, int], float] = {}
    events = []
    for line in lines:
        if line["ph"] == "b":
            begun[line["pid"], line["id"]] = line["ts"]
        elif line["ph"] != "M":
            events.append(_event(line, names, begun))
    return sorted(events, key=lambda event: event.ended_s)


def _event(line: dict[str, Any], names: dict[int, str], begun: dict[tuple[int, int], float]) -> Event:
    began_us = begun.pop((line["pid"], line["id"])) if line["ph"] == "e" else line["ts"]
    facts = dict(line["args"])
    return Event(
        name=line["name"],
        handoff=facts.pop("handoff"),
        process=names[line["pid"]],
        began_s=began_us / 1e6,
        ended_s=(line["ts"] + line.get("dur", 0.0)) / 1e6,
        facts=facts,
    )


def lives(events: list[Event]) -> dict[str, list[Event]]:
    """The events of each handoff."""
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event.handoff, []).append(event)
    return found
