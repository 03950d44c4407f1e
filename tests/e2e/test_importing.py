"""The import of the connectors, in the process that instances are forked from."""

import subprocess

import pytest

from tests.zygote import VLLM, Zygote


@pytest.mark.smoke
def test_importing_the_connectors_starts_no_thread_and_loads_no_ucx(zygote: Zygote) -> None:
    assert {"kvpipe.connector", "kvpipe.store_connector"} <= set(VLLM)
    # A zygote with a second thread would refuse.
    command = [*zygote.command("tests.zygote.programs"), "maps"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "/kvpipe/_kvpipe" in done.stdout
    assert "libucp" not in done.stdout
