"""The hand-over of hybrid models, beside a full-attention model with as many bytes: `python -m bench.bench_groups`.

Prefill computes a prompt, then decode is asked: the hand-over has the whole load. Per prompt, a model with sliding
windows or recurrent states moves some blocks of each KV cache group; the model with full attention gets a prompt whose
KV has as many bytes.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import machine
from bench.handoff import client
from bench.instances import model
from bench.instances.servers import ServerPool, resumed
from bench.instances.vllm import BLOCK_SIZE, TOKEN, kvpipe_transfer, start_instance
from bench.processes import SubjectError
from bench.report import markdown
from kvpipe.control import ControlClient
from kvpipe.launch.ports import free_ports
from kvpipe.launch.spec import LOOPBACK
from kvpipe.transfer_params import consume, produce
from tests.e2e.model_kinds import gemma3, qwen3_next

NUM_LAYERS = 8
WINDOW = 512
FULL, HYBRIDS = "full attention", ("sliding windows", "recurrent states")
# A block of a model with states is as large as a state: a prompt has few, and no more of the last one than it needs.
_LARGE_BLOCK = 544


def _write(name: str, folder: Path) -> None:
    """Writes the model of a subject: half of a hybrid's layers have full attention."""
    import transformers  # noqa: PLC0415 - installed with vLLM

    model.write_model(folder, NUM_LAYERS)
    if name == FULL:
        return
    shape = {
        "hidden_size": model.NUM_KV_HEADS * model.HEAD_DIM,
        "intermediate_size": model.NUM_KV_HEADS * model.HEAD_DIM,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": model.NUM_KV_HEADS,
        "num_key_value_heads": model.NUM_KV_HEADS,
        "head_dim": model.HEAD_DIM,
        "max_position_embeddings": model.MAX_TOKENS,
    }
    if name == "sliding windows":
        layers = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
        config = gemma3(transformers, **shape, layer_types=layers, sliding_window=WINDOW)
        config.architectures = ["Gemma3ForCausalLM"]
    else:
        layers = ["linear_attention", "full_attention"] * (NUM_LAYERS // 2)
        heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        config = qwen3_next(transformers, **shape, **heads, layer_types=layers)
        config.architectures = ["Qwen3NextForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config.to_dict()))


@dataclass(frozen=True)
class HandedOver:
    """A handoff: its bytes, and milliseconds of decode's hand-over, of its transfer, and until its first token."""

    num_bytes: int
    handover_ms: float
    transfer_ms: float
    first_ms: float


class Pair:
    """A prefill and a decode instance of one model."""

    def __init__(self, pool: ServerPool, work: Path, name: str, omp_threads: int) -> None:
        self.name = name
        folder = work / name.replace(" ", "-")
        _write(name, folder / "model")
        self._controls = [f"{LOOPBACK}:{port}" for port in free_ports(2)]
        args = ["--max-model-len", str(model.MAX_TOKENS), "--max-num-batched-tokens", "2048"]
        env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(omp_threads)))}
        self.servers = [
            start_instance(pool, folder, role, args, transfer=kvpipe_transfer(role, control), env=env)
            for role, control in zip(("kv_producer", "kv_consumer"), self._controls, strict=True)
        ]
        for server in self.servers:
            server.until_healthy()
        self._control = ControlClient(TOKEN)

    def hand_over(self, num_tokens: int, seed: str) -> HandedOver:
        """Has prefill compute a prompt, and decode go on with it.

        Raises:
            SubjectError: Not all KV came from prefill.
        """
        prompt, handoff = model.random_prompt(num_tokens, f"{self.name} {seed}"), secrets.token_hex(16)
        client.prefill(self.servers[0].url, prompt, kv_transfer_params=produce(handoff))
        found = client.stream(self.servers[1].url, prompt, kv_transfer_params=consume(handoff, self._controls[0]))
        result = self._control.result(self._controls[1], handoff).wait() or {}
        if result.get("result") != "full":
            message = f"{self.name}: {num_tokens} tokens were not handed over: {result}"
            raise SubjectError(message)
        first_ms = 1e3 * (found.texts_s[0] - found.asked_s)
        return HandedOver(result["bytes"], result["handover_ms"], result["transfer_ms"], first_ms)


def main() -> None:
    """Measures each hybrid model and the one with full attention in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=6 * _LARGE_BLOCK, help="of a hybrid's prompts; default 3264")
    parser.add_argument("--rounds", type=int, default=15, help="default 15")
    parser.add_argument("--omp-threads", type=int, default=2, metavar="N", help="of each worker; default 2")
    parser.add_argument("--work", type=Path, default=Path(".cache/bench-groups"), help="folder for models and logs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    found: dict[str, list[tuple[HandedOver, HandedOver]]] = {}
    with ServerPool() as pool:
        pairs = {}
        for name in (FULL, *HYBRIDS):
            print(f"starting {name}", file=sys.stderr)
            pairs[name] = Pair(pool, args.work.absolute(), name, args.omp_threads)
            _hand_over(pairs[name], args.tokens, "warm-up")
        lengths = {name: _length(pairs, name, args.tokens) for name in HYBRIDS}
        for number in range(args.rounds):
            for name in HYBRIDS:
                asks = [(name, args.tokens), (FULL, lengths[name])]
                # Each one is first in every other round.
                asked = {
                    subject: _hand_over(pairs[subject], num_tokens, f"{name} {number}")
                    for subject, num_tokens in asks[:: 1 if number % 2 else -1]
                }
                found.setdefault(name, []).append((asked[name], asked[FULL]))
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    print(_table(found))
    print(f"medians of {args.rounds} rounds; load average {machine.load_average():.1f}")
    if args.json:
        facts = machine.machine() | {"tokens": args.tokens, "lengths": lengths}
        rounds = {name: [[vars(each) for each in pair] for pair in measured] for name, measured in found.items()}
        args.json.write_text(json.dumps({**facts, "rounds": rounds}, indent=1))


def _hand_over(pair: Pair, num_tokens: int, seed: str) -> HandedOver:
    with resumed(pair.servers):
        # Re-establishes sessions that broke while the instances were stopped.
        pair.hand_over(BLOCK_SIZE, f"before {seed}")
        return pair.hand_over(num_tokens, seed)


def _length(pairs: dict[str, Pair], name: str, num_tokens: int) -> int:
    """Returns the length of a prompt with full attention whose KV has as many bytes, in whole blocks."""
    num_bytes = _hand_over(pairs[name], num_tokens, "bytes").num_bytes
    block_bytes = BLOCK_SIZE * model.kv_bytes_per_token(NUM_LAYERS)
    return BLOCK_SIZE * round(num_bytes / block_bytes)


def _table(found: dict[str, list[tuple[HandedOver, HandedOver]]]) -> str:
    lines = []
    for name, rounds in found.items():
        hybrids, fulls = zip(*rounds, strict=True)
        lines += [_line(name, hybrids), _line(f"{FULL} beside it", fulls)]
        ratios = [_ratio(rounds, column) for column in ("num_bytes", "handover_ms", "transfer_ms", "first_ms")]
        lines.append(["ratio, median of rounds [quartiles]", *ratios])
    return markdown(["model", "MiB", "hand-over, ms", "transfer, ms", "first token, ms"], lines)


def _line(name: str, measured: tuple[HandedOver, ...]) -> list[str]:
    columns = ("handover_ms", "transfer_ms", "first_ms")
    medians = [statistics.median(getattr(each, column) for each in measured) for column in columns]
    return [name, f"{measured[0].num_bytes / (1 << 20):.1f}", *(f"{figure:.1f}" for figure in medians)]


def _ratio(rounds: list[tuple[HandedOver, HandedOver]], column: str) -> str:
    ratios = [getattr(hybrid, column) / getattr(full, column) for hybrid, full in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
