"""Each `vllm serve` of the pages and of examples/: its flags as vLLM reads them, its settings as the connectors do."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname

from kvpipe.connector import ContinuingScheduler
from kvpipe.vllm.handoff.config import ConnectorConfig
from kvpipe.vllm.plugin import register
from kvpipe.vllm.store.config import StoreConnectorConfig

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
MANIFESTS = sorted(ROOT.glob("examples/**/*.yaml"))
# Up to a line's end that is not within quotes.
COMMAND = re.compile(r"^(?:\w+=\S+ )*vllm serve ((?:'[^']*'|[^'\n])*)", re.MULTILINE)
UP = re.compile(r"^kvpipe up (\S+) .*?-- (.*)$", re.MULTILINE)
JSON = re.compile(r"^```json\n(\{\"kv_connector\".*?)^```", re.DOTALL | re.MULTILINE)
BLOCK_SIZE = 16


def dictionaries(content: Any) -> Iterator[dict[str, Any]]:
    """All of a file of YAML."""
    if isinstance(content, dict):
        yield content
    for part in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from dictionaries(part)


def of_manifest(path: Path) -> list[list[str]]:
    """Arguments of `vllm serve`, of which a container may have some in `args`."""
    # Kubernetes sets a container's variables.
    text = path.read_text().replace("$(HTTP_PORT)", "8000")
    found = (part for document in yaml.safe_load_all(text) for part in dictionaries(document))
    commands = ([*(part.get("command") or ()), *(part.get("args") or ())] for part in found)
    return [command[2:] for command in commands if command[:2] == ["vllm", "serve"]]


def of_page(path: Path) -> list[list[str]]:
    """Arguments of `vllm serve`, and those that `kvpipe up` passes on."""
    page = path.read_text().replace("\\\n", " ")
    return [shlex.split(text) for text in COMMAND.findall(page)] + [
        [model, *shlex.split(text)] for model, text in UP.findall(page)
    ]


def named(commands: dict[Path, list[Any]]) -> list[Any]:
    return [
        pytest.param(command, id=f"{path.relative_to(ROOT)}-{number}")
        for path, of_path in commands.items()
        for number, command in enumerate(of_path)
    ]


OF_PAGES = named({path: of_page(path) for path in PAGES})
OF_MANIFESTS = named({path: of_manifest(path) for path in MANIFESTS})
CONFIGURATIONS = named({path: [json.loads(text) for text in JSON.findall(path.read_text())] for path in PAGES})


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


def assert_is_read_by_its_connector(config: KVTransferConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    name, extra = config.kv_connector, config.kv_connector_extra_config
    if name == "MultiConnector":
        for part in extra["connectors"]:
            assert_is_read_by_its_connector(KVTransferConfig(**part), monkeypatch)
        return
    register()
    assert name in KVConnectorFactory._registry
    if name == "KVPipeConnector":
        ConnectorConfig.parse(extra)
    elif name == "KVStoreConnector":
        monkeypatch.setenv("KVPIPE_STORE", "kvpipe://10.0.0.9:7300")  # as manifests do
        StoreConnectorConfig.parse(extra, BLOCK_SIZE)


def test_the_commands_of_the_pages_and_of_the_manifests_are_found() -> None:
    ids = {str(parameter.id) for parameter in (*OF_PAGES, *OF_MANIFESTS, *CONFIGURATIONS)}
    assert ids >= {"README.md-1", "docs/guide/quickstart.md-1", "docs/guide/vllm.md-0", "docs/guide/store.md-0"}
    assert ids >= {"examples/containers/compose.yaml-1", "examples/kubernetes/base/decode.yaml-0"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_command_of_a_page_is_left_out(path: Path) -> None:
    page = path.read_text().replace("\\\n", " ")
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    assert blocks.count("vllm serve") == len(COMMAND.findall(blocks))


@pytest.mark.parametrize("command", [*OF_PAGES, *OF_MANIFESTS])
def test_vllm_and_the_connector_read_each_argument_of_a_command(
    command: list[str], parser: FlexibleArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parser.parse_args(command)
    assert args.model_tag == command[0]
    if args.scheduler_cls is not None:
        assert resolve_obj_by_qualname(args.scheduler_cls) is ContinuingScheduler
    if args.kv_transfer_config is not None:
        assert_is_read_by_its_connector(args.kv_transfer_config, monkeypatch)


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_vllm_and_the_connectors_read_each_key_of_a_configuration(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_is_read_by_its_connector(KVTransferConfig(**config), monkeypatch)
