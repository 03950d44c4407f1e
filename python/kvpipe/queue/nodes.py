"""Recent reports of workers about themselves. Pure: no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

REPORT_EVERY_S = 5.0
# Three reports have not come.
_FORGOTTEN_AFTER_S = 3 * REPORT_EVERY_S + 1
_FIELDS = {"decode", "slots", "running", "reason", "forces_first_tokens", "reasoning_parser"}


class Nodes:
    """The latest report of each worker."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[dict[str, Any], float]] = {}

    def add(self, report: dict[str, Any], now_s: float) -> None:
        """Takes a report; one without `is_here` is a worker's last, and one without all fields is none."""
        name = str(report.get("worker"))
        if report.get("is_here") and report.keys() >= _FIELDS:
            self._reports[name] = report, now_s
        else:
            self._reports.pop(name, None)

    def all(self, now_s: float) -> list[dict[str, Any]]:
        """The reports of workers that are there."""
        self._reports = {
            name: (report, at_s) for name, (report, at_s) in self._reports.items() if now_s - at_s < _FORGOTTEN_AFTER_S
        }
        return [report for report, _ in self._reports.values()]

    def common(self, fields: Iterable[str], now_s: float) -> dict[str, Any] | None:
        """Returns these fields of all reports; `None` without a report, or where they differ."""
        found = [{field: report.get(field) for field in fields} for report in self.all(now_s)]
        return found[0] if found and all(each == found[0] for each in found) else None
