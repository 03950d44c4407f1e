"""Names of `import kvpipe`, and the effects that it does not have."""

import inspect
import json
import subprocess
import sys

import pytest

import kvpipe

HEAVY = {"torch", "numpy", "vllm", "aiohttp", "orjson", "uvloop"}
PUBLIC = [name for name in kvpipe.__all__ if name != "__version__"]
# Effects that an import may not have, reported by a process that does nothing else.
LOOK = """
import json, os, sys, threading
print(json.dumps({
    "modules": sorted(sys.modules),
    "python_threads": threading.active_count(),
    "threads": len(os.listdir("/proc/self/task")),
    "maps": open("/proc/self/maps").read(),
}))
"""


def look_after(code):
    done = subprocess.run([sys.executable, "-c", code + LOOK], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_is_sorted_and_complete():
    assert kvpipe.__all__ == sorted(kvpipe.__all__)
    public = {
        name
        for name, value in vars(kvpipe).items()
        if not name.startswith("_") and not (inspect.ismodule(value) and name != "exceptions")
    }
    assert public == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name):
    value = getattr(kvpipe, name)
    assert inspect.getdoc(value)
    assert value.__doc__ is not None
    if inspect.isclass(value):
        undocumented = [
            member
            for member, part in vars(value).items()
            if not member.startswith("_") and callable(getattr(value, member)) and not inspect.getdoc(part)
        ]
        assert undocumented == []


def test_import_kvpipe_loads_nothing_heavy_and_starts_nothing():
    seen = look_after("import kvpipe, kvpipe.control, kvpipe.config, kvpipe.testing")
    assert not HEAVY & set(seen["modules"])
    assert (seen["python_threads"], seen["threads"]) == (1, 1)
    assert "libucp" not in seen["maps"]


def test_import_kvpipe_leaves_asyncio_to_those_who_await():
    seen = look_after("import kvpipe")
    assert "asyncio" not in seen["modules"]
