"""Every map and queue of the core is counted through a simulated day, or is listed here with what bounds it."""

import re
from pathlib import Path

CORE = Path(__file__).parents[1] / "rust/core/src"
KEPT = "HashMap|BTreeMap|HashSet|BTreeSet|VecDeque|BinaryHeap|Timers|Multimap|Pool"
FIELD = re.compile(rf"^    (?:pub(?:\([a-z: ]+\))? )?(\w+): (?:\w+<)*(?:{KEPT})<?.*,$", re.MULTILINE)
SIZES = re.compile(r"fn (?:sizes|len|num_\w+)\(.*?\n    }\n", re.DOTALL)

# Bound of each field that nothing counts, by file and name.
NOT_COUNTED = {
    ("blocks/regions.rs", "waiting_for"): "the sessions, for each closing region",
    ("control/producer.rs", "watchers"): "the sessions that watch a handoff, which are counted by session",
    ("blocks/handoff/ready.rs", "left"): "the ready blocks of a step in the ready queue",
    ("entries/lookup/client/fetches.rs", "rest"): "the five tensors of an entry",
    ("entries/server/arrival.rs", "rest"): "the five parts of a put",
    ("entries/shared.rs", "client_actions"): "the answers of one event, which are sent at its end",
    ("entries/state.rs", "actions"): "what follows one change, which ends with none",
    ("session/links.rs", "to_flush"): "the sessions to which one event has sent messages, which leave at its end",
    ("transfer/incoming_stream.rs", "coming"): "one part on each connection of a session, which has 17 at most",
    ("transport/memory.rs", "connected"): "the endpoints; the transport in memory is for tests",
    ("transport/memory.rs", "copies"): "the reads in flight; the transport in memory is for tests",
}


def fields():
    """The maps and queues in structs that are not of tests: `(file, field)`."""
    for file in CORE.rglob("*.rs"):
        name = str(file.relative_to(CORE))
        if not re.search(r"tests|simulated_day|fuzzing", name):
            text = file.read_text().partition("#[cfg(test)]\nmod tests")[0]
            yield from ((name, match[1]) for match in FIELD.finditer(text))


def test_each_map_and_queue_is_counted_or_says_what_bounds_it():
    counts = "".join(body for file in CORE.rglob("*.rs") for body in SIZES.findall(file.read_text()))
    unknown = {field for field in fields() if not re.search(rf"\.{field[1]}\b", counts)}
    assert unknown == set(NOT_COUNTED)
