"""Properties that the ranks of an engine add to its fingerprint, and their merge. It needs no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The tensor parallel size of an engine whose KV ranks of any number can read.
ANY_SIZE = "any"
_SEPARATOR = "; "


def merge_ranks(properties: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Merges the properties of an engine's ranks: a value that they share is named once."""
    values: dict[str, dict[str, None]] = {}
    for rank in properties:
        for name, value in rank:
            values.setdefault(name, {})[value] = None
    return [(name, "; ".join(found)) for name, found in values.items()]


def merge_layers(properties: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Merges the properties of ranks with different layers, so that one rank with all of these has the same ones.

    Values are lists, see `joined`. `ANY_SIZE` of some layers is nothing where others have a size.
    """
    values: dict[str, set[str]] = {}
    for rank in properties:
        for name, value in rank:
            values.setdefault(name, set()).update(value.split(_SEPARATOR))
    return [(name, joined(found - {ANY_SIZE} or found)) for name, found in values.items()]


def joined(values: Iterable[str]) -> str:
    """Returns a list as the value of a property: sorted, without repetitions."""
    return _SEPARATOR.join(sorted(set(values)))
