"""LoRA adapters: a request is loaded only where its producer used the same adapter, by name and by content."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from kvpipe import _kvpipe
from kvpipe.transfer_params import consume, produce
from kvpipe.vllm import lora_adapters
from kvpipe.vllm.lora_adapters import Adapters
from kvpipe.vllm.prompt_hash import prompt_hash
from tests.vllm.handoff.engine import Engine, new_id
from tests.vllm.handoff.test_scheduler import RANKS, loading, prompt, reported, scheduled, until

pytestmark = pytest.mark.vllm


def adapter(folder: Path, value: float = 1.0, name: str = "style", form: str = "safetensors") -> LoRARequest:
    """An adapter with files, all of whose weights are `value`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "peft_type": "LORA"}))
    tensors = {"layer.lora_A.weight": torch.full((8, 16), value), "layer.lora_B.weight": torch.full((16, 8), value)}
    if form == "safetensors":
        safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    else:
        torch.save(tensors, folder / "adapter_model.bin")
    return LoRARequest(name, 1, str(folder))


def described(lora: LoRARequest | None, known: Adapters | None = None) -> str:
    """An engine's description of the adapter of a request."""
    return (known or Adapters()).describe(SimpleNamespace(lora_request=lora))


def consuming(engine: Engine, producer: _kvpipe.Control, lora: LoRARequest | None, theirs: str) -> tuple[Request, str]:
    """A request whose producer used an adapter."""
    handoff = new_id()
    request = engine.add(prompt(100), params=consume(handoff, producer.address), lora_request=lora)
    producer.open(bytes.fromhex(handoff), prompt_hash(request), 100, RANKS, theirs)
    producer.finish(bytes.fromhex(handoff), [7], "length", 0, bytes(32))
    return request, handoff


def test_an_adapter_of_the_same_name_with_other_weights_is_not_loaded_and_both_are_named(
    engine: Engine, producer: _kvpipe.Control, tmp_path: Path
) -> None:
    ours, theirs = adapter(tmp_path / "ours", 1.0), described(adapter(tmp_path / "theirs", 2.0))
    request, handoff = consuming(engine, producer, ours, theirs)
    assert scheduled(engine, request) == 100
    result = reported(engine, handoff)
    assert result["reason"] == f"LoRA adapter is {described(ours)} here and {theirs} at the producer"
    assert result["first_token"] == "sampled"


def test_the_same_adapter_in_another_folder_is_loaded(
    engine: Engine, producer: _kvpipe.Control, tmp_path: Path
) -> None:
    ours, theirs = adapter(tmp_path / "ours"), adapter(tmp_path / "theirs")
    request, _ = consuming(engine, producer, ours, described(theirs))
    assert loading(engine, request).request_id == request.request_id


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_adapter_on_one_side_alone_is_named(
    engine: Engine, producer: _kvpipe.Control, tmp_path: Path, *, is_ours: bool
) -> None:
    lora = adapter(tmp_path / "style")
    name = described(lora)
    request, handoff = consuming(engine, producer, lora if is_ours else None, "" if is_ours else name)
    assert scheduled(engine, request) == 100
    ours, theirs = (name, "none") if is_ours else ("none", name)
    assert reported(engine, handoff)["reason"] == f"LoRA adapter is {ours} here and {theirs} at the producer"


def test_a_producer_says_which_adapter_it_used(engine: Engine, tmp_path: Path) -> None:
    lora, handoff = adapter(tmp_path / "style"), new_id()
    engine.add(prompt(100), max_tokens=1, params=produce(handoff), lora_request=lora)
    engine.step()
    consumer = _kvpipe.Control(None, b"", "consumer")
    consumer.watch(bytes.fromhex(handoff), engine.role.address)
    [opened] = until(lambda: [event for event in consumer.drain() if event["event"] == "opened"])
    assert opened["adapter"] == described(lora)
    consumer.close()


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_name_and_content_identify_an_adapter(tmp_path: Path, form: str) -> None:
    first = described(adapter(tmp_path / "a", 1.0, form=form))
    assert first.startswith("style (")
    assert described(adapter(tmp_path / "b", 1.0, form=form)) == first
    assert described(adapter(tmp_path / "c", 2.0, form=form)) != first
    assert described(adapter(tmp_path / "d", 1.0, "other", form)) == first.replace("style", "other")


def test_adapters_that_differ_in_one_value_are_two(tmp_path: Path) -> None:
    first, second = adapter(tmp_path / "a"), adapter(tmp_path / "b")
    weights = Path(second.lora_path) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    assert described(first) != described(second)


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The weights that were read."""
    read: list[Path] = []

    def counted(paths: list[Path]) -> str:
        read.append(paths[-1])
        return hashed(paths)

    hashed = lora_adapters._hash
    monkeypatch.setattr(lora_adapters, "_hash", counted)
    return read


def test_the_files_of_an_adapter_are_read_once(tmp_path: Path, num_read: list[Path]) -> None:
    lora, known = adapter(tmp_path / "style"), Adapters()
    assert described(lora, known) == described(lora, known)
    assert len(num_read) == 1


def test_an_adapter_whose_files_have_changed_is_not_compared_any_more(tmp_path: Path) -> None:
    """The engine may have the old ones in memory, or blocks of theirs in its prefix cache."""
    lora, known = adapter(tmp_path / "style", 1.0), Adapters()
    first = described(lora, known)
    adapter(tmp_path / "style", 2.0)
    os.utime(tmp_path / "style" / "adapter_model.safetensors", ns=(1, 1))
    assert described(lora, known) == "style (not compared: its files have changed since its first use here)"
    assert described(LoRARequest("style", 2, lora.lora_path), known) != first


def test_the_files_that_count_are_those_of_the_first_request_of_any_kind(engine: Engine, tmp_path: Path) -> None:
    lora = adapter(tmp_path / "style", 1.0)
    engine.add(prompt(100), lora_request=lora)
    adapter(tmp_path / "style", 2.0)
    os.utime(tmp_path / "style" / "adapter_model.safetensors", ns=(1, 1))
    assert "have changed" in described(lora, engine.role._adapters)


def test_an_adapter_that_neither_side_can_compare_is_not_loaded(engine: Engine, producer: _kvpipe.Control) -> None:
    lora = LoRARequest("style", 1, "tests/nowhere")
    request, handoff = consuming(engine, producer, lora, described(lora))
    assert scheduled(engine, request) == 100
    assert "not compared" in reported(engine, handoff)["reason"]


def test_a_path_in_a_home_folder_is_found_as_vllm_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lora = adapter(tmp_path / "style")
    assert described(LoRARequest("style", 1, "~/style")) == described(lora)


def test_a_disk_that_fails_is_no_error_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = adapter(tmp_path / "style")

    def fails(*_: Any) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "is_dir", fails)
    assert described(lora) == f"style (not compared: {lora.lora_path}: Stale file handle)"


def test_an_adapter_without_files_is_said_not_to_be_compared(tmp_path: Path) -> None:
    assert described(LoRARequest("style", 1, "tests/nowhere")) == (
        "style (not compared: tests/nowhere@main is not on this disk)"
    )
    assert "not compared: " in described(LoRARequest("style", 1, str(tmp_path)))


def test_a_request_without_an_adapter_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_adapters, "find_files", None)

    assert described(None) == ""
