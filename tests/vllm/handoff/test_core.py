"""The worker role without vLLM."""

import subprocess
import sys

_MODULES = (
    *("first_token.pending", "kept_blocks", "settings"),
    *("handoff.config", "handoff.integrity", "handoff.metadata", "handoff.worker"),
    *("handoff.consumer.rank_loads", "handoff.consumer.state_machine"),
    *("handoff.producer.progress", "handoff.producer.rank_leases"),
)
_PROGRAM = f"""
import sys

class NoVllm:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ImportError("vLLM is not installed")

sys.meta_path.insert(0, NoVllm())
import importlib
import kvpipe.connector
for name in {_MODULES!r}:
    importlib.import_module(f"kvpipe.vllm.{{name}}")
assert "vllm" not in sys.modules
try:
    kvpipe.connector.KVPipeConnector
except ImportError as error:
    print(error)
"""


def test_the_worker_role_and_what_it_uses_need_no_vllm() -> None:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert (ran.stdout, ran.stderr) == ("vLLM is not installed\n", "")
