"""README.md and docs/ beside the code: the links, settings, flags, variables, metrics, messages and tests they name."""

import ast
import collections
import dataclasses
import functools
import re
import subprocess
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from kvpipe import cli, exceptions
from kvpipe.proxy import ProxyConfig
from kvpipe.proxy.config import DEFAULT_SPLIT_FROM
from kvpipe.proxy.metrics import Metrics
from kvpipe.store import StoreStats
from kvpipe.store.metrics import StoreMetrics

ROOT = Path(__file__).parents[1]
# Of vLLM and what it imports, not ours.
OF_VLLM = (
    "… received pp_rank > 0",
    "AsyncLLM output_handler",
    "No package metadata",
    "Turning off hybrid",
    "nanobind: leaked",
    "operator torchvision",
    "resource_tracker:",
)
MONITORING = "docs/guide/monitoring.md"
TIMEOUTS = "docs/internals/timeouts.md"
SETTINGS, METRICS, FAILURES, STORE_FAILURES = (
    f"docs/reference/{name}.md" for name in ("settings", "metrics", "failures", "store-failures")
)


def tracked():
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    return [path for path in listed.splitlines() if (ROOT / path).is_file()]


FILES = tracked()
PAGES = [path for path in FILES if path.endswith(".md")]
DOCS = [path for path in PAGES if path.startswith("docs/")]
CODE = [path for path in FILES if path.endswith((".py", ".pyi", ".rs", ".toml", ".sh"))]
PRODUCT = [path for path in CODE if re.match(r"python/kvpipe/|rust/\w+/src/", path)]


@functools.cache
def text_of(path):
    return (ROOT / path).read_text()


def prose(path):
    return re.sub(r"^```.*?^```", "", text_of(path), flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(path):
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)) if "://" not in target]


def resolved(path, target):
    return str((ROOT / path).parent.joinpath(target).resolve().relative_to(ROOT))


def first_cells(path, section=""):
    """The first cell of each row of a page's tables, or of those of one of its sections."""
    part = text_of(path).partition(f"\n## {section}\n")[2].partition("\n## ")[0] if section else text_of(path)
    return re.findall(r"^\| ([^|]+) \|", part, re.MULTILINE)


@pytest.mark.parametrize("path", PAGES)
def test_every_relative_link_leads_somewhere(path):
    for target in links(path):
        file, _, fragment = target.partition("#")
        page = resolved(path, file) if file else path
        assert (ROOT / page).exists(), target
        assert not fragment or fragment in anchors(page), target


def test_code_names_only_pages_that_exist():
    named = {(path, page) for path in CODE for page in re.findall(r"\bdocs/[\w/-]+\.md", text_of(path))}
    assert named
    assert [(path, page) for path, page in named if page not in DOCS] == []


@pytest.mark.parametrize("path", DOCS)
def test_a_page_says_first_who_it_is_for(path):
    assert re.match(r"# [^\n]+\n\nThis (page|index) is for [^\n]+\.\n[A-Z][^\n]+\n", text_of(path))


def test_every_page_is_reached_from_the_index():
    reached, left = set(), ["docs/README.md"]
    while left:
        page = left.pop()
        if page not in reached and page in DOCS:
            reached.add(page)
            left += [resolved(page, target.partition("#")[0]) for target in links(page) if not target.startswith("#")]
    assert sorted(set(DOCS) - reached) == []


def connector_settings(path="python/kvpipe/vllm/handoff/config.py", name="ConnectorConfig"):
    """Names and defaults, without vLLM, which importing the connector would take."""
    tree = ast.parse(text_of(path))
    [config] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    fields = [node for node in config.body if isinstance(node, ast.AnnAssign)]
    return {field.target.id: eval(ast.unparse(field.value)) for field in fields}


@pytest.mark.parametrize(("name", "default"), connector_settings().items())
def test_every_setting_of_the_connector_is_in_the_reference_with_its_default(name, default):
    text = f"{default:g}" if isinstance(default, float) else f"`{default}`" if default else "empty"
    assert f"| `{name}` | {text} |" in text_of(SETTINGS)
    assert f"`KVPIPE_{name.upper()}`" in text_of(SETTINGS)


def store_connector_settings():
    return connector_settings("python/kvpipe/vllm/store/config.py", "StoreConnectorConfig")


@pytest.mark.parametrize(("name", "default"), store_connector_settings().items())
def test_every_setting_of_the_store_connector_is_in_the_reference_with_its_default(name, default):
    text = f"`{default}`".lower() if isinstance(default, bool | str) and default != "" else f"{default}" or "empty"
    part = text_of(SETTINGS).partition("\n## The store connector\n")[2].partition("\n## ")[0]
    assert f"| `{name}` | {text.removesuffix('.0')} |" in part
    variable = "KVPIPE_STORE" if name == "store" else f"KVPIPE_STORE_{name.upper()}"
    assert f"`{variable}`" in text_of(SETTINGS)


def test_every_setting_of_the_proxy_is_in_the_reference():
    missing = [
        field.name for field in dataclasses.fields(ProxyConfig) if f"| `{field.name}` |" not in text_of(SETTINGS)
    ]
    assert missing == []


def test_the_bound_of_short_prompts_is_documented_with_its_default():
    assert f"| `--split-from TOKENS` | `split_from` | {DEFAULT_SPLIT_FROM} |" in text_of(SETTINGS)
    assert f"The default is {DEFAULT_SPLIT_FROM}:" in text_of("docs/guide/proxy.md")


@pytest.mark.parametrize("command", [["up"], ["doctor"], ["proxy"], ["worker"], ["store", "serve"]], ids=" ".join)
def test_every_flag_is_in_the_reference(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    own = capsys.readouterr().out.partition("\nexamples:\n")[0]  # those may have flags of vLLM
    flags = set(re.findall(r"--[a-z][a-z-]+", own)) - {"--help"}
    assert "--token" in flags
    assert [flag for flag in flags if f"`{flag}" not in text_of(SETTINGS)] == []


def test_every_variable_that_the_product_reads_is_in_the_reference():
    variables = {name for path in PRODUCT for name in re.findall(r"\bKVPIPE_[A-Z_]*[A-Z]\b", text_of(path))}
    documented = {name for name in variables if f"`{name}`" in text_of(SETTINGS)}
    assert "KVPIPE_TOKEN" in documented
    assert {name for name in variables - documented if not name.startswith("KVPIPE_TEST_")} == set()


def store_metrics():
    stats = StoreStats(
        **dict.fromkeys((field.name for field in dataclasses.fields(StoreStats)), 0)
        | {"details": collections.defaultdict(int)}
    )
    exposed = generate_latest(StoreMetrics(lambda: stats).registry).decode()
    return set(re.findall(r"^# TYPE (\S+)", exposed, re.MULTILINE))


def test_every_metric_is_in_the_reference_and_no_other():
    exposed = re.findall(r"^# TYPE (\S+)", Metrics().response().body.decode(), re.MULTILINE)
    metrics = {name for name in exposed if not name.endswith("_created")} | store_metrics()
    documented = {cell.strip("`") for cell in first_cells(METRICS) if cell.startswith("`kvpipe_")}
    assert documented == metrics != set()


def connector_metrics():
    """Names as Prometheus shows them, without vLLM, which importing the connector would take."""
    registered = [
        found
        for package in ("handoff", "store")
        for found in re.findall(
            r'self\._(\w+)_cls\(\s*name="([^"]+)"', text_of(f"python/kvpipe/vllm/{package}/stats.py")
        )
    ]
    return {f"{name}_total" if kind == "counter" else name for kind, name in registered}


def test_every_metric_of_the_connector_is_in_the_reference_and_no_other():
    documented = {cell.strip("`") for cell in first_cells(METRICS) if cell.startswith("`vllm:kvpipe_")}
    assert documented == connector_metrics() != set()


@pytest.mark.parametrize("page", [METRICS, MONITORING])
def test_every_metric_that_a_page_names_exists(page):
    named = set(re.findall(r"vllm:kvpipe_\w+[a-z]", text_of(page)))
    assert named - connector_metrics() == set() != named


def test_every_reason_of_a_lost_handoff_is_in_the_reference_and_no_other():
    documented = {cell.strip("`") for cell in first_cells(METRICS, "vLLM's own metrics")}
    members = (
        text_of("python/kvpipe/vllm/handoff/consumer/consumed.py")
        .partition("class LossReason")[2]
        .partition("\n\n\n")[0]
    )
    reasons = set(re.findall(r'^    [A-Z_]+ = "(\w+)"$', members, re.MULTILINE))
    assert "unreachable" in reasons
    rest = {name for name in documented if re.fullmatch(r"[a-z_]+", name)}
    assert rest - {"metric", "label", "result", "reason", "data_path", "rank"} == reasons


def result_keys():
    """Keys of a handoff's result, without vLLM, which importing the connector would take."""
    report = text_of("python/kvpipe/vllm/handoff/consumer/consumed.py").partition("def report(")[2].partition("def ")[0]
    return re.findall(r'^ +"(\w+)":', report, re.MULTILINE)


def test_the_quickstart_shows_a_result_as_the_proxy_answers_it():
    shown = re.findall(r'^    "(\w+)":', text_of("docs/guide/quickstart.md"), re.MULTILINE)
    assert shown == [*result_keys(), "dispatch"]


def test_every_key_of_a_result_is_in_the_reference():
    assert {f"`{key}`" for key in result_keys()} - set(first_cells("docs/reference/status.md")) == set()


def test_every_error_class_is_in_the_python_api():
    classes = {f"`{name}`" for name, value in vars(exceptions).items() if isinstance(value, type)} - {"`KVPipeError`"}
    assert {cell for cell in first_cells("docs/guide/python-api.md", "Errors") if cell.startswith("`")} == classes


def quoted_messages():
    """Messages of ours that the documentation quotes; `…` stands for what varies."""
    cells = [re.fullmatch(r"`([^`]+)`", cell) for cell in first_cells("docs/guide/troubleshooting.md")]
    refusals = re.findall(r"(?:\*\*refused\*\*|warning)[^|`]*: `([^`]+)`", text_of("docs/reference/compatibility.md"))
    quoted = {cell[1] for cell in cells if cell} | set(refusals)
    return sorted(message for message in quoted if " " in message and not message.startswith(OF_VLLM))


@functools.cache
def strings():
    """The product's source, with its strings joined where they are broken over lines."""
    return "\n".join(re.sub(r'\\\n\s*|"\s*\n\s*f?"', "", text_of(path)) for path in PRODUCT)


def test_the_messages_that_an_operator_meets_are_quoted():
    assert len(quoted_messages()) > 50


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_one_of_the_products(message):
    parts = [part.strip(" '\":;=()") for part in re.split(r"…|\.\.\.", message)]
    assert [part for part in parts if part not in strings()] == []


def test_the_log_lines_of_the_product_are_in_the_page_on_monitoring():
    logs = [cell for cell in first_cells(MONITORING, "Logs") if cell.startswith("`")]
    documented = {event for cell in logs for event in re.findall(r"`([a-z_]+\.[a-z_]+)", cell)}
    logged = set(re.findall(r'logger\.(?:info|warning|error)\(\s*"([a-z_]+\.[a-z_]+)', strings()))
    assert logged - documented == set()
    assert [event for event in documented if f'"{event}' not in strings()] == []


def test_the_lines_of_the_trace_are_those_of_the_product():
    rows = text_of(MONITORING).partition("\n## Trace\n")[2]
    names = [name for row in rows.splitlines() if row.startswith("| ") for name in re.findall(r"`([a-z ]+)`", row)]
    assert "announced" in names
    assert [name for name in names if f'"{name}"' not in strings()] == []


@pytest.mark.parametrize("page", [FAILURES, STORE_FAILURES])
def test_every_row_of_the_failure_tables_names_a_test_that_exists(page):
    named = re.findall(r"^\| .* \| `(\w+)` \|$", text_of(page), re.MULTILINE)
    assert len(named) == len([cell for cell in first_cells(page) if cell != "event" and not cell.startswith("-")])
    tests = "\n".join(text_of(path) for path in CODE if path.endswith((".py", ".rs")))
    assert sorted(set(named) - set(re.findall(r"\b(?:def|fn) (\w+)\(", tests))) == []


def constants():
    """The rows of the constants: what, value, files."""
    part = text_of(TIMEOUTS).partition("\n## Constants\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| ")
    ]
    return [(row[0], row[1], re.findall(r"`([^`]+)`", row[-1])) for row in rows if row[0] != "what"]


@pytest.mark.parametrize(("what", "value", "files"), constants(), ids=str)
def test_every_constant_of_the_time_outs_has_its_value_where_the_page_says(what, value, files):
    folder = {".rs": "rust/core/src/", ".py": "python/kvpipe/"}
    paths = [file if file.startswith("rust/") else folder[file[-3:]] + file for file in files]
    assert paths
    assert [path for path in paths if path not in FILES] == []
    number = re.match(r"([\d.]+)(?: to [\d.]+)? ?(s|ms)?\b", value)
    if number is None:
        assert "the call's `timeout`" in value
        return
    amount, unit = float(number[1]), number[2]
    micros = amount * {"s": 1e6, "ms": 1e3}.get(unit, 1)
    spelled = {
        f"from_secs({micros / 1e6:g})",
        f"from_millis({micros / 1e3:g})",
        f"from_micros({micros:g})",
        f'"{amount:g}{unit}"',
        f"tv_sec: {amount:g},",
    }
    plain = re.compile(rf"(?:=|default=) ?{amount:g}(?:\.0)?\b")
    for path in paths:
        text = text_of(path)
        # A duration of Rust has its unit beside it; a number alone could be any other of the file.
        is_plain = path.endswith(".py") or unit is None
        assert any(one in text for one in spelled) or (is_plain and plain.search(text)), f"{what}: {value} in {path}"
