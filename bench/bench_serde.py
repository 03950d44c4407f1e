"""Size, speed and error of each serde, and what it does to the next token: `python -m bench.bench_serde`.

Speed: one thread encodes and decodes chunks of 4 MiB, one after the other, of more memory than the caches have. Serdes
and memcpy take turns. Seconds are the thread's CPU time, so that the turns of other programs do not count.

Effect: the KV of prompts goes through each serde, and the model continues from it with given tokens. Its distributions
of the next token are compared with those after `naive`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench import machine
from bench.checkout import ROOT
from bench.plot import drawing, save
from bench.report import markdown
from bench.results import summarize
from kvpipe.store.serde import SERDES, Layout, Serde

TINY_MODEL = ROOT / "examples" / "disagg_prefill" / "tiny_model.py"
# 256 tokens of four layers with 8 KV heads of 128.
CHUNK = Layout(dtype="bfloat16", num_layers=4, num_blocks=2, num_kv_heads=8, block_size=128, head_size=128)
BLOCK_SIZE = 128
BATCH = 16
CONTINUED = 32
MEMCPY = "memcpy"
# The KV as the model computed it, of which `naive` keeps bfloat16.
NOT_ROUNDED = "float32"
COLORS = {"naive": "tab:gray", "int8": "tab:blue", "fp8": "tab:green", "kivi4": "tab:orange", "kivi2": "tab:red"}


class Speed:
    """Chunks, and where they are encoded and decoded to: each larger than the caches."""

    def __init__(self, num_bytes: int) -> None:
        self._num_chunks = -(-num_bytes // CHUNK.num_bytes)
        rng = np.random.default_rng(0)
        values = rng.standard_normal(8 * CHUNK.num_bytes // 2, dtype=np.float32)
        values = (values.reshape(-1, CHUNK.head_size) * rng.uniform(0.2, 5, CHUNK.head_size)).astype(ml_dtypes.bfloat16)
        chunks = values.view(np.uint8).reshape(8, CHUNK.num_bytes)
        self._data = chunks[np.arange(self._num_chunks) % 8]
        largest = max(Serde.parse(name).max_bytes(CHUNK) for name in SERDES)
        self._streams = np.zeros((self._num_chunks, largest), np.uint8)
        self._out = np.zeros_like(self._data)

    @property
    def num_bytes(self) -> int:
        """Bytes that a round encodes."""
        return self._data.nbytes

    def copy_s(self) -> float:
        """CPU seconds to copy all chunks."""
        began = time.thread_time()
        for data, out in zip(self._data, self._out, strict=True):
            np.copyto(out, data)
        return time.thread_time() - began

    def round_s(self, serde: Serde) -> tuple[float, float, float]:
        """CPU seconds to encode and to decode all chunks, and the size of the streams as a part of them."""
        began = time.thread_time()
        streams = [serde.encode(data, CHUNK, place) for data, place in zip(self._data, self._streams, strict=True)]
        encoded = time.thread_time()
        for stream, out in zip(streams, self._out, strict=True):
            serde.decode(stream, CHUNK, out)
        ended = time.thread_time()
        return encoded - began, ended - encoded, sum(map(len, streams)) / self._data.nbytes


def measure_speed(num_rounds: int, num_bytes: int) -> dict[str, dict[str, Any]]:
    """GB/s of chunks, medians with percentiles, and ratios to the memcpy of the same round."""
    speed = Speed(num_bytes)
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in (MEMCPY, *SERDES)}
    for number in range(-1, num_rounds):
        order = [MEMCPY, *SERDES]
        random.Random(number).shuffle(order)  # noqa: S311 - no secret
        for name in order:
            sample = (*[speed.copy_s()] * 2, 1.0) if name == MEMCPY else speed.round_s(Serde.parse(name))
            if number >= 0:  # the first round touches the memory for the first time
                samples[name].append(sample)
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    copies = [sample[0] for sample in samples[MEMCPY]]
    found = {}
    for name, rounds in samples.items():
        found[name] = {"size": rounds[0][2]}
        for index, direction in enumerate(("encode", "decode")):
            rates = summarize([speed.num_bytes / each[index] / 1e9 for each in rounds])
            ratio = statistics.median(copy / each[index] for copy, each in zip(copies, rounds, strict=True))
            found[name][direction] = {"median": rates.median, "p10": rates.p10, "p90": rates.p90, "to_memcpy": ratio}
    return found


class Continuation:
    """Prompts whose KV was computed once, and how the model goes on from KV that went through a serde."""

    def __init__(self, folder: Path, num_prompts: int, num_tokens: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._batches = _prompts(folder, num_prompts, num_tokens + CONTINUED).split(BATCH)
        self._num_tokens = num_tokens
        self._kv = [self._prefill(batch[:, :num_tokens]) for batch in self._batches]
        config = self._model.config
        self.layout = Layout(
            dtype="bfloat16",
            num_layers=config.num_hidden_layers,
            num_blocks=num_tokens // BLOCK_SIZE,
            num_kv_heads=config.num_key_value_heads,
            block_size=BLOCK_SIZE,
            head_size=config.head_dim,
        )

    def after(self, serde: Serde) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Log-probabilities of the next tokens, the restored KV, and the size of the streams as a part of it."""
        logits, restored, num_bytes = [], [], 0
        for tokens, kv in zip(self._batches, self._kv, strict=True):
            chunks = []
            for prompt in kv.bfloat16():  # [num_layers, num_blocks, num_kv_heads, 2, block_size, head_size]
                stream = serde.encode(prompt.contiguous().view(torch.uint8).numpy(), self.layout)
                chunk = torch.empty_like(prompt, memory_format=torch.contiguous_format)
                serde.decode(stream, self.layout, chunk.view(torch.uint8).numpy())
                chunks.append(chunk)
                num_bytes += len(stream)
            restored.append(torch.stack(chunks).float())
            logits.append(self._continue(tokens[:, self._num_tokens :], restored[-1]))
        num_prompts = sum(map(len, self._batches))
        return torch.cat(logits), torch.cat(restored), num_bytes / num_prompts / self.layout.num_bytes

    def not_rounded(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """As `after`, of the KV before it was rounded to bfloat16."""
        pairs = zip(self._batches, self._kv, strict=True)
        return (
            torch.cat([self._continue(tokens[:, self._num_tokens :], kv) for tokens, kv in pairs]),
            torch.cat(self._kv),
            2.0,
        )

    @torch.inference_mode()
    def _prefill(self, tokens: torch.Tensor) -> torch.Tensor:
        """KV: `[prompts, num_layers, num_blocks, num_kv_heads, 2, block_size, head_size]`."""
        cache = DynamicCache()
        self._model(tokens, past_key_values=cache)
        kv = torch.stack([torch.stack([layer.keys, layer.values], dim=2) for layer in cache.layers], dim=1)
        return kv.unflatten(4, (-1, BLOCK_SIZE)).permute(0, 1, 4, 2, 3, 5, 6)

    @torch.inference_mode()
    def _continue(self, tokens: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        cache = DynamicCache()
        for index, layer in enumerate(kv.permute(1, 4, 0, 3, 2, 5, 6).flatten(4, 5)):
            cache.update(layer[0], layer[1], index)
        return self._model(tokens, past_key_values=cache).logits.log_softmax(-1)


def _prompts(folder: Path, num_prompts: int, num_tokens: int) -> torch.Tensor:
    """Pieces of the standard library's sources."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    found: list[list[int]] = []
    for source in sources:
        tokens = tokenizer(source.read_text(errors="replace"))["input_ids"]
        if len(found) < num_prompts and len(tokens) >= num_tokens:
            start = random.Random(source.name).randrange(len(tokens) - num_tokens + 1)  # noqa: S311 - no secret
            found.append(tokens[start : start + num_tokens])
    return torch.tensor(found)


def measure_effect(continuation: Continuation) -> dict[str, dict[str, float]]:
    """Error of the KV, and the distributions of the next token against those after `naive`."""
    wanted, kv, _ = continuation.after(Serde.parse("naive"))
    found = {}
    for name in (NOT_ROUNDED, *SERDES):
        is_serde = name in SERDES
        got, restored, size = continuation.after(Serde.parse(name)) if is_serde else continuation.not_rounded()
        divergence = (wanted.exp() * (wanted - got)).sum(-1).flatten().double()
        error = (restored - kv).double()
        found[name] = {
            "size": size,
            "relative_rms": (error.square().mean() / kv.double().square().mean()).sqrt().item(),
            "largest_error": (error.abs().max() / kv.abs().max()).item(),
            "mean_kl": divergence.mean().item(),
            "p99_kl": divergence.quantile(0.99).item(),
            "same_top_token": (wanted.argmax(-1) == got.argmax(-1)).double().mean().item(),
            "num_positions": divergence.numel(),
        }
        print(f"effect of {name}", file=sys.stderr)
    return found


def report(speed: dict[str, dict[str, Any]], effect: dict[str, dict[str, float]]) -> str:
    """The two tables."""
    fast = ["serde", "size", "encode, GB/s", "to memcpy", "decode, GB/s", "to memcpy"]
    rows = []
    for name, row in speed.items():
        cells = [name, f"{row['size']:.3f}"]
        for direction in ("encode", "decode"):
            rate = row[direction]
            text = f"{rate['median']:.2f} [{rate['p10']:.2f}, {rate['p90']:.2f}]"
            cells += [text, f"{rate['to_memcpy']:.2f}"]
        rows.append(cells)
    near = ["serde", "size", "relative RMS", "largest error", "mean KL", "p99 KL", "same top token"]
    effects = [
        [
            name,
            f"{row['size']:.3f}",
            f"{row['relative_rms']:.2%}",
            f"{row['largest_error']:.2%}",
            f"{row['mean_kl']:.2g}",
            f"{row['p99_kl']:.2g}",
            f"{row['same_top_token']:.1%}",
        ]
        for name, row in effect.items()
    ]
    return markdown(fast, rows) + "\n\n" + markdown(near, effects)


def draw(path: Path, speed: dict[str, dict[str, Any]], effect: dict[str, dict[str, float]], title: str) -> None:
    """Draws speed as bars, and the divergence against the size."""
    drawn = drawing(12, 4.4)
    left, right = drawn.subplots(1, 2)
    names = [name for name in speed if name != MEMCPY]
    for offset, direction, color in ((-0.2, "encode", "tab:blue"), (0.2, "decode", "tab:orange")):
        rates = [speed[name][direction] for name in names]
        medians = [rate["median"] for rate in rates]
        noise = [[rate["median"] - rate["p10"] for rate in rates], [rate["p90"] - rate["median"] for rate in rates]]
        places = [place + offset for place in range(len(names))]
        left.bar(places, medians, 0.38, yerr=noise, capsize=2, ecolor="dimgray", color=color, label=direction)
    left.axhline(speed[MEMCPY]["encode"]["median"], color="black", linewidth=0.9, linestyle=":", label=MEMCPY)
    left.set_xticks(range(len(names)), names)
    left.set_ylabel("GB of KV for each CPU second")
    left.set_title("speed", fontsize=11)
    left.legend(fontsize=8, frameon=False)
    left.grid(alpha=0.3, axis="y")
    for name in SERDES[1:]:
        row, color = effect[name], COLORS.get(name, "tab:purple")
        right.plot([row["size"]] * 2, [row["mean_kl"], row["p99_kl"]], color=color, linewidth=1.2)
        right.plot(row["size"], row["mean_kl"], marker="o", color=color)
        right.plot(row["size"], row["p99_kl"], marker="_", markersize=10, color=color)
        # Beside the dot, on the side without another serde.
        place, side = ((-7, -3), "right") if name == "cachegen" else ((7, -3), "left")
        point = (row["size"], row["mean_kl"])
        right.annotate(name, point, xytext=place, textcoords="offset points", ha=side, fontsize=9)
    floor = effect[NOT_ROUNDED]["mean_kl"]
    right.axhline(floor, color="black", linewidth=0.9, linestyle=":", label="mean of rounding to bfloat16")
    right.legend(fontsize=8, frameon=False)
    right.set_yscale("log")
    right.set_xlim(0, 0.65)
    right.set_xlabel("size, as a part of naive")
    right.set_ylabel("KL divergence from naive: mean (dot), p99 (bar)")
    right.set_title("next token, tiny model with random weights", fontsize=11)
    right.grid(alpha=0.3)
    save(drawn, path, title)


def _tiny_model() -> Path:
    spec = importlib.util.spec_from_file_location("tiny_model", TINY_MODEL)
    if spec is None or spec.loader is None:
        raise SystemExit(f"error: {TINY_MODEL} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_tiny_model()


def main() -> None:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, help="chunks to walk through; by default 1.25 times the largest cache")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=4 * BLOCK_SIZE, help=f"of a prompt; a multiple of {BLOCK_SIZE}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.tokens % BLOCK_SIZE or args.tokens < BLOCK_SIZE:
        parser.error(f"--tokens {args.tokens}: expected a multiple of {BLOCK_SIZE}")
    facts = machine.machine()
    num_bytes = args.mib << 20 if args.mib else (machine.cache_bytes() or 64 << 20) * 5 // 4
    speed = measure_speed(args.rounds, num_bytes)
    facts["load_average_after_speed"] = machine.load_average()
    effect = measure_effect(Continuation(_tiny_model(), args.prompts, args.tokens))
    print(report(speed, effect))
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "speed": speed, "effect": effect}, indent=1))
    if args.plot:
        title = f"{facts['cpu']}, {facts['num_cpus']} CPUs, load {facts['load_average']}"
        draw(args.plot, speed, effect, f"{title}; {args.rounds} rounds, {args.prompts} prompts of {args.tokens} tokens")


if __name__ == "__main__":
    main()
