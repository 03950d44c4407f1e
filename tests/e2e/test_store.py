"""Instances that share a store: P and D that have never heard of each other, and both beside a handoff."""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvpipe.launch.deployment import Instance
from kvpipe.transfer_params import resume
from tests.e2e.client import COMPLETIONS, Servers, completion, get, new_handoff, post, prompt, until
from tests.e2e.groups import REPOSITORY, Groups, tiny_model
from tests.e2e.groups import STORE_CHUNK as CHUNK
from tests.e2e.identity import BY_ID, Said, ask, differences

NUM_TOKENS = 6 * CHUNK + 9


def said(url: str, body: dict[str, Any]) -> Said:
    return Said.of(ask(url, COMPLETIONS, body | BY_ID)[0])


def chunks(instance: Instance, result: str, reason: str = "") -> float:
    """Chunks that an instance counts."""
    lines = get(instance.url, "/metrics").decode().splitlines()
    wanted = [f'result="{result}"'] + ([f'reason="{reason}"'] if reason else [])
    found = [line for line in lines if line.startswith("vllm:kvpipe_store_chunks_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in found if all(label in line for label in wanted))


def stored(instance: Instance, folder: Path, body: dict[str, Any]) -> list[Path]:
    """Has an instance compute a prompt, and returns the files of its chunks in the order of their age."""
    before = set(folder.iterdir())
    said(instance.url, body | {"max_tokens": 1})
    num_chunks = len(body["prompt"]) // CHUNK

    def new() -> list[Path]:
        return [path for path in set(folder.iterdir()) - before if "." not in path.name]

    until(lambda: len(new()) == num_chunks)
    return sorted(new(), key=lambda path: path.stat().st_mtime_ns)


def is_right(servers: Servers, instance: Instance, body: dict[str, Any]) -> bool:
    return not differences([said(servers.undivided.url, body)], [said(instance.url, body)])


def test_what_prefill_has_stored_decode_loads_and_answers_as_one_instance(sharing: Servers, folder: Path) -> None:
    for seed, length in enumerate((NUM_TOKENS, 4 * CHUNK, 4 * CHUNK - 1, CHUNK + 1), start=300):
        body = completion(prompt(length, seed=seed))
        stored(sharing.prefill, folder, body)
        before = chunks(sharing.decode, "loaded")
        assert is_right(sharing, sharing.decode, body)
        until(lambda before=before, length=length: chunks(sharing.decode, "loaded") - before == length // CHUNK)


@pytest.mark.parametrize("more", [{"temperature": 1.2, "top_p": 0.9}, {"temperature": 0.8, "n": 2}])
def test_sampled_and_parallel_answers_are_those_of_one_instance(
    sharing: Servers, folder: Path, more: dict[str, Any]
) -> None:
    # vLLM on CPU dies of a seeded request that is computed in several chunks.
    body = completion(prompt(3 * CHUNK + 5, seed=310 + len(more) + ("n" in more)))
    stored(sharing.prefill, folder, body)
    assert is_right(sharing, sharing.decode, body | {"seed": 11, **more})


def test_another_prefill_loads_what_the_first_has_stored_and_adds_what_is_new(sharing: Servers, folder: Path) -> None:
    shared = prompt(4 * CHUNK, seed=320)
    stored(sharing.prefill, folder, completion(shared))
    longer = completion(shared + prompt(2 * CHUNK + 3, seed=321))
    before = {path.name for path in folder.iterdir()}
    assert is_right(sharing, sharing.decode, longer)
    until(lambda: len({path.name for path in folder.iterdir() if "." not in path.name} - before) == 2)
    assert is_right(sharing, sharing.prefill, longer)


def asked(instance: Instance, path: str) -> None:
    """Posts a request of an operator."""
    with post(instance.url, path, {}) as answer:
        assert answer.status == HTTPStatus.OK, answer.read()


@pytest.mark.parametrize(
    "paths",
    [["/pause", "/resume"], ["/sleep", "/wake_up"], ["/reset_prefix_cache?reset_external=true"]],
    ids=" ".join,
)
def test_instances_that_were_reset_go_on_sharing_what_they_stored_before_and_after(
    sharing: Servers, folder: Path, paths: list[str]
) -> None:
    before, after = (completion(prompt(NUM_TOKENS, seed=430 + len("".join(paths)) + more)) for more in (0, 2))
    stored(sharing.prefill, folder, before)
    for path in paths:
        for instance in (sharing.prefill, sharing.decode):
            asked(instance, path)
    stored(sharing.prefill, folder, after)
    for body in (before, after):
        num_loaded = chunks(sharing.decode, "loaded")
        assert is_right(sharing, sharing.decode, body)
        until(lambda num_loaded=num_loaded: chunks(sharing.decode, "loaded") == num_loaded + NUM_TOKENS // CHUNK)


def reloaded(instance: Instance, model: Path) -> None:
    """Updates the weights of a running instance, as an operator does."""
    asked(instance, "/pause")
    order = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    with post(instance.url, "/collective_rpc", order) as answer:
        assert answer.status == HTTPStatus.OK, answer.read()
    asked(instance, "/resume")


def test_instances_whose_weights_were_updated_alike_share_again_and_before_that_nothing(
    sharing: Servers, folder: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    [weights] = other.glob("*.safetensors")
    # vLLM on CPU keeps this one in oneDNN's form only.
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(weights)
    save_file(tensors | {name: tensors[name] + 0.01}, weights, {"format": "pt"})
    body = completion(prompt(NUM_TOKENS, seed=420))
    try:
        reloaded(sharing.prefill, other)
        stored(sharing.prefill, folder, body)
        num_loaded = chunks(sharing.decode, "loaded")
        assert is_right(sharing, sharing.decode, body)
        assert chunks(sharing.decode, "loaded") == num_loaded
        reloaded(sharing.decode, other)
        assert not differences([said(sharing.prefill.url, body)], [said(sharing.decode.url, body)])
        until(lambda: chunks(sharing.decode, "loaded") == num_loaded + NUM_TOKENS // CHUNK)
    finally:
        for instance in (sharing.prefill, sharing.decode):
            reloaded(instance, Path(tiny_model()))


def flip(path: Path) -> None:
    """Changes one chunk by hand, in the middle of its content, to other numbers of the same kind."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 & ~3
    for at in range(middle, middle + 4096, 4):
        data[at + 3] ^= 0x80  # the sign of a float32
    path.unlink()
    path.write_bytes(data)


def test_a_chunk_that_was_changed_by_hand_is_a_miss_and_the_answer_right(sharing: Servers, folder: Path) -> None:
    body = completion(prompt(NUM_TOKENS, seed=330))
    files = stored(sharing.prefill, folder, body)
    flip(files[2])
    assert is_right(sharing, sharing.decode, body)
    until(lambda: chunks(sharing.decode, "missed", "corrupt") > 0)


def test_without_the_check_a_changed_chunk_would_make_the_answer_wrong(
    sharing: Servers, folder: Path, order: Path
) -> None:
    body = completion(prompt(NUM_TOKENS, seed=331))
    files = stored(sharing.prefill, folder, body)
    for file in files:
        flip(file)
    order.write_text("unchecked")
    try:
        assert not is_right(sharing, sharing.decode, body)
    finally:
        order.unlink()


def first_tokens(instance: Instance, reason: str) -> float:
    """Requests with a handoff through the store, as an instance counts them."""
    lines = get(instance.url, "/metrics").decode().splitlines()
    found = [line for line in lines if line.startswith("vllm:kvpipe_store_first_tokens_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in found if f'reason="{reason}"' in line)


@pytest.mark.parametrize("more", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 37])
def test_decode_goes_on_from_prefills_token_where_both_share_a_store_only(
    sharing: Servers, length: int, more: dict[str, Any]
) -> None:
    body = completion(prompt(length, seed=360 + len(more))) | more
    before = first_tokens(sharing.decode, "none")
    proxy = sharing.through("store")
    assert not differences([said(sharing.undivided.url, body)], [said(proxy, body)])
    until(lambda: first_tokens(sharing.decode, "none") == before + 1)


def test_a_token_that_is_sampled_without_a_seed_is_prefills(sharing: Servers) -> None:
    before, proxy = first_tokens(sharing.decode, "none"), sharing.through("store")
    for seed in range(4):
        said(proxy, completion(prompt(2 * CHUNK + 9, seed=370 + seed), temperature=1.5))
    until(lambda: first_tokens(sharing.decode, "none") == before + 4)


def test_a_request_that_was_cut_off_goes_on_at_a_decode_that_loads_its_prompt(sharing: Servers, folder: Path) -> None:
    body = completion(prompt(2 * CHUNK + 9, seed=380)) | {"temperature": 1.2, "seed": 5}
    stored(sharing.prefill, folder, body)
    expected, before = said(sharing.undivided.url, body), chunks(sharing.decode, "loaded")
    params = {"kv_transfer_params": resume(new_handoff(), expected.token_ids[:7])}
    assert not differences([expected], [said(sharing.decode.url, body | params)])
    until(lambda: chunks(sharing.decode, "loaded") == before + 2)


def test_prefills_token_is_sent_before_decodes_stream_and_the_text_is_that_of_one_instance(sharing: Servers) -> None:
    proxy = sharing.through("store")

    def num_early() -> float:
        lines = get(proxy, "/metrics").decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("kvpipe_early_tokens_total"))

    def is_early(seed: int) -> bool:
        before, body = num_early(), completion(prompt(2 * CHUNK + 9, seed=seed), stream=True)
        assert sharing.answer(proxy, COMPLETIONS, body)[0] == sharing.expected(COMPLETIONS, body)
        return num_early() > before

    # The proxy learns within seconds that decode forces tokens.
    seeds = itertools.count(400)
    until(lambda: is_early(next(seeds)))


def test_nothing_but_chunks_stays_in_the_store(sharing: Servers, folder: Path) -> None:
    before = set(folder.iterdir())
    # No other test asks for this prompt: its chunks are new.
    said(sharing.through("store"), completion(prompt(2 * CHUNK + 9, seed=385)))
    until(lambda: len(set(folder.iterdir()) - before) == 2)


REMOVED: dict[str, Callable[[list[Path]], list[Path]]] = {"the first": lambda files: files[:1], "all": list}


@pytest.mark.parametrize("which", REMOVED)
def test_chunks_that_are_gone_are_computed(sharing: Servers, folder: Path, which: str) -> None:
    body = completion(prompt(NUM_TOKENS, seed=340 + len(which)))
    for file in REMOVED[which](stored(sharing.prefill, folder, body)):
        file.unlink()
    assert is_right(sharing, sharing.decode, body)


# --- the store beside the pipe


def until_saved(groups: Groups, num_chunks: float) -> None:
    """Waits until kvpipe's own store has so many chunks."""
    until(lambda: groups.store_server.stats().num_values == num_chunks)


def test_a_handoff_comes_by_the_pipe_and_a_request_without_one_from_the_store(
    pipe_and_store: Servers, groups: Groups
) -> None:
    servers, body = pipe_and_store, completion(prompt(NUM_TOKENS, seed=350))
    text, handoff = servers.answer(servers.through("sequential"), COMPLETIONS, body)
    assert text == servers.expected(COMPLETIONS, body)
    assert servers.result(handoff)["result"] == "full"
    assert chunks(servers.decode, "loaded") == 0
    until_saved(groups, NUM_TOKENS // CHUNK)
    other = completion(prompt(NUM_TOKENS, seed=351))
    said(servers.prefill.url, other)
    until_saved(groups, 2 * (NUM_TOKENS // CHUNK))
    assert is_right(servers, servers.decode, other)
    until(lambda: chunks(servers.decode, "loaded") == NUM_TOKENS // CHUNK)
    servers.come_to_rest()


def test_a_handoff_of_a_prompt_that_prefill_has_from_the_store_is_complete(
    pipe_and_store: Servers, groups: Groups
) -> None:
    servers, body = pipe_and_store, completion(prompt(NUM_TOKENS, seed=352))
    num_before = groups.store_server.stats().num_values
    said(servers.decode.url, body)
    until_saved(groups, num_before + NUM_TOKENS // CHUNK)
    other = body | {"prompt": body["prompt"] + prompt(CHUNK, seed=353)}
    before = chunks(servers.prefill, "loaded")
    text, handoff = servers.answer(servers.through("sequential"), COMPLETIONS, other)
    assert text == servers.expected(COMPLETIONS, other)
    assert servers.result(handoff)["result"] == "full"
    assert chunks(servers.prefill, "loaded") - before == NUM_TOKENS // CHUNK
    servers.come_to_rest()


def test_instances_that_start_as_users_start_them_load_all_kv_from_the_store(groups: Groups) -> None:
    """The other groups are forked."""
    groups.end()
    demo = REPOSITORY / "examples/store/demo.py"
    done = subprocess.run([sys.executable, demo], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all KV came from the store" in done.stdout
