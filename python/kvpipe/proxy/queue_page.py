"""The page of `/queue`: what waits, and which workers there are. Pure."""

from html import escape
from typing import Any

_REFRESH_S = 2
_STYLE = "body{font-family:sans-serif;margin:2em}td,th{padding:.3em 1em;text-align:left;border-bottom:1px solid #ccc}"


def queue_page(state: dict[str, Any]) -> str:
    """Writes the page, which reloads itself.

    Args:
        state: as of `DecodeQueue.state`.
    """
    queues = [(name, depth["messages"], depth["consumers"]) for name, depth in state["queues"].items()]
    workers = [
        (each["decode"], f"{each['running']} of {each['slots']}", each["reason"] or "takes requests")
        for each in state["workers"]
    ]
    return (
        f"<!doctype html><meta charset=utf-8><meta http-equiv=refresh content={_REFRESH_S}>"
        f"<title>kvpipe queue</title><style>{_STYLE}</style><h1>{escape(state['broker'])}</h1>"
        + _table(("queue", "messages", "consumers"), queues)
        + _table(("decode instance", "requests", "state"), workers)
    )


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table><p>"


def _row(cell: str, values: tuple[Any, ...]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(str(value))}</{cell}>" for value in values) + "</tr>"
