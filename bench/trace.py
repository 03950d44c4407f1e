"""Reads a trace of `KVPIPE_TRACE`: the events of handoffs, in seconds of `time.monotonic`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Event:
    """An event of a handoff.

    Attributes:
        name: Name of the event.
        handoff: The handoff's id.
        process: Name of the process.
        began_s: When it began.
        ended_s: When it ended; equal to `began_s` for an instant.
        facts: Numbers with more detail.
    """

    name: str
    handoff: str
    process: str
    began_s: float
    ended_s: float
    facts: dict[str, int] = field(default_factory=dict)


def read(path: Path) -> list[Event]:
    """Reads all events of a trace, ordered by their end.

    Raises:
        ConfigError: The file cannot be read, or is not a trace.
    """
    try:
        # the last line may be incomplete, and the closing bracket is never written
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


def by_handoff(events: list[Event]) -> dict[str, list[Event]]:
    """Groups events by handoff."""
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event.handoff, []).append(event)
    return found
