#!/usr/bin/env python3
"""Prints which folder uses which, lowest first.

It fails when a folder uses itself by way of others, or when a folder of `USERS` is used by another than those named.

scripts/folders.py python|rust

A file that lies beside folders is a node of the graph too. Python: every import, lazy ones included. Rust: the
`crate::` and `super::` paths of rust/core, without code under `#[cfg(test)]`.
"""

import ast
import re
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path

Module = tuple[str, ...]

ROOT = Path(__file__).resolve().parent.parent
PATH = re.compile(r"\b(?P<root>crate|(?:super::)*super)::(?P<rest>\w+(?:::\w+)*)")

# Folders by the one that holds them, each with what beside it may use it.
USERS: dict[str, dict[str, set[str]]] = {
    "kvpipe/vllm": {"handoff": set(), "store": set()},
    "kvpipe/vllm/handoff": {
        "consumer": {"requests", "scheduler", "worker"},
        "producer": {"requests", "scheduler", "worker"},
    },
}


def python_uses(package: Path) -> dict[Module, set[Module]]:
    """The modules that each module of a Python package imports, of the same package."""
    trees = {
        module_of(file.relative_to(package), "__init__"): ast.parse(file.read_text())
        for file in package.rglob("*.py*")
        if file.suffix in {".py", ".pyi"}
    }
    return {module: {known(name, trees) for name in imported(tree, package.name)} for module, tree in trees.items()}


def imported(tree: ast.AST, package: str) -> Iterator[Module]:
    """The dotted names that a file imports from a package."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == package:
                yield tuple(rest)


def rust_uses(source: Path) -> dict[Module, set[Module]]:
    """The modules that each module of a Rust crate names, of the same crate."""
    texts = {module_of(file.relative_to(source), "mod"): file.read_text() for file in source.rglob("*.rs")}
    texts[()] = texts.pop(("lib",))
    for module, text in list(texts.items()):
        if module not in texts:
            continue
        texts[module], test_modules = without_tests(re.sub(r"//.*", "", text))
        for name in test_modules:
            for each in [each for each in texts if each[: len(module) + 1] == (*module, name)]:
                del texts[each]
    return {module: {known(name, texts) for name in named(text, module)} for module, text in texts.items()}


def without_tests(text: str) -> tuple[str, list[str]]:
    """The text without items under `#[cfg(test)]`, and the modules among these that are files."""
    modules = []
    while (found := text.find("#[cfg(test)]")) >= 0:
        end, depth = found, 0
        for match in re.compile(r"[{};]").finditer(text, found):
            depth += {"{": 1, "}": -1, ";": 0}[match[0]]
            end = match.end()
            if depth == 0:
                break
        modules += re.findall(r"\bmod (\w+);", text[found:end])
        text = text[:found] + text[end:]
    return text, modules


def named(text: str, module: Module) -> Iterator[Module]:
    """What the `crate::` and `super::` paths of a module name."""
    for path in PATH.finditer(re.sub(r"\buse ([^;]+);", lambda use: flat(use[1]), text)):
        start = () if path["root"] == "crate" else module[: -path["root"].count("super")]
        yield *start, *path["rest"].split("::")


def flat(tree: str) -> str:
    """A `use` tree without braces: `a::{b, c::d}` is `a::b, a::c::d`."""
    while (flatter := re.sub(r"([\w:]*)\{([^{}]*)\}", joined, tree)) != tree:
        tree = flatter
    return tree


def joined(group: re.Match[str]) -> str:
    """One innermost group of braces, its prefix put before each item."""
    return ", ".join(group[1] + item.strip() for item in group[2].split(",") if item.strip())


def module_of(file: Path, index: str) -> Module:
    """The module of a file; a file named `index` is its folder's."""
    parts = file.with_suffix("").parts
    return parts[:-1] if parts[-1] == index else parts


def known(name: Module, modules: Iterable[Module]) -> Module:
    """The module that a dotted name belongs to."""
    while name and name not in modules:
        name = name[:-1]
    return name


def folder_graphs(uses: dict[Module, set[Module]]) -> Iterator[tuple[Module, dict[str, set[str]]]]:
    """For each folder that holds folders: which of its children use which."""
    inside = {module[:-1] for module in uses if module}
    for folder in sorted({each[:-1] for each in inside if each}):
        depth = len(folder)
        graph: dict[str, set[str]] = defaultdict(set)
        for module, others in uses.items():
            for other in others:
                if module[:depth] == other[:depth] == folder:
                    user, used = (child(each, depth) for each in (module, other))
                    graph[user] |= {used} - {user}
                    graph[used] |= set()
        yield folder, graph


def child(module: Module, depth: int) -> str:
    """The folder or file at a depth that a module belongs to."""
    return module[depth] if len(module) > depth else "(itself)"


def reached(graph: dict[str, set[str]], start: str) -> dict[str, str]:
    """What a node uses, directly or not, and by way of which node."""
    via: dict[str, str] = {}
    queue = deque([start])
    while queue:
        user = queue.popleft()
        for used in sorted(graph.get(user, set()) - via.keys()):
            via[used] = user
            queue.append(used)
    return via


def cycle(via: dict[str, str], folder: str) -> str:
    """The way from a folder back to it."""
    path = [folder, via[folder]]
    while path[-1] != folder:
        path.append(via[path[-1]])
    return " -> ".join(reversed(path))


def main(language: str) -> int:
    """Prints the graphs of a language and returns the exit status."""
    if language == "python":
        folders = [ROOT / "python/kvpipe", ROOT / "bench"]
        return max(print_graphs(folder.name, python_uses(folder)) for folder in folders)
    return print_graphs("kvpipe_core", rust_uses(ROOT / "rust/core/src"))


def print_graphs(package: str, uses: dict[Module, set[Module]]) -> int:
    """Prints the graphs of one package or crate; returns 1 if there is a cycle."""
    folders = {module[: index + 1] for module in uses for index in range(len(module) - 1)}
    status = 0
    for parent, graph in folder_graphs(uses):
        path = "/".join((package, *parent))
        print(path)
        via = {name: reached(graph, name) for name in graph}
        for name in sorted(graph, key=lambda name: (len(via[name]), name)):
            print(f"  {name} -> {', '.join(sorted(graph[name])) or 'nothing'}")
            if name in via[name] and (*parent, name) in folders:
                print(f"  CYCLE: {cycle(via[name], name)}")
                status = 1
        for name, users in USERS.get(path, {}).items():
            for user in sorted(user for user in graph if name in graph[user] and user not in users):
                print(f"  FORBIDDEN: {user} -> {name}")
                status = 1
    return status


if __name__ == "__main__":
    if sys.argv[1:] not in (["python"], ["rust"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
