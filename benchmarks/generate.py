"""Language models token by token, beside peers: ``python benchmarks/generate.py [--model 160M]``.

Llama-like models with random weights, the same for all variants. Each variant has a process of its own
(peers/generation.py); all take turns in slices of one run, and a slice in which other processes used the CPU is
measured again. Prints tokens per second of decoding at batch 1 and milliseconds of a prompt (median, minimum and
maximum), the memory that the process has, how near the logits are to float32's, and the share of the memory's bandwidth
that decoding reaches, counted in the bytes of int8 weights that a token reads.

Peers run in environments of their own, which have what they need: ``--compile-python`` torchao (beside this
environment's torch and transformers), ``--openvino-python`` ``optimum-intel[openvino]``, ``--llama-python``
llama-cpp-python, gguf and safetensors. What cannot run is named with its error.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import models  # noqa: F401  # what transformers asks of torchvision
import torch
from compare import Process, cpu, undisturbed
from tabulate import tabulate
from transformers import LlamaConfig, LlamaForCausalLM

#: Sizes of models: hidden, of the feed-forward, layers, heads, heads of keys and values, words.
SIZES = {
    "tiny": (64, 128, 2, 4, 2, 1000),
    "15M": (288, 768, 6, 6, 6, 32000),
    "160M": (768, 3072, 12, 12, 12, 32000),
    "1B": (2048, 5632, 22, 32, 4, 32000),
}
VARIANTS = ("float32", "bfloat16", "dbrq eager", "dbrq onednn", "torchao int8 weights", "torchao int8 dynamic",
            "OpenVINO int8", "OpenVINO int8, its defaults", "llama.cpp Q8_0")  # fmt: skip


@dataclass
class Measured:
    """A variant: milliseconds for each slice, bytes that its process has, dB against float32, or why it did not run."""

    error: str = ""
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    resident: int = 0
    sqnr: float = float("nan")

    @property
    def per_token(self) -> float:
        return statistics.median(self.decode)


def written(name: str, folder: str) -> LlamaForCausalLM:
    """A model with random weights, in a folder of transformers."""
    hidden, inner, layers, heads, groups, words = SIZES[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, vocab_size=words, max_position_embeddings=2048,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def int8_bytes(model: torch.nn.Module) -> int:
    """What a token reads of the model with its linear layers in int8: as the report of the dynamic recipe has it."""
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    rest = sum(p.nbytes for p in model.parameters() if p.dim() == 1)
    return sum(w.numel() + 4 * w.shape[0] for w in linear) + rest


def sqnr(expected: list[float], got: list[float]) -> float:
    from dbrq.inspection.comparing import sqnr as of_tensors

    return of_tensors(torch.tensor(expected), torch.tensor(got))


def measure(folder: str, options: argparse.Namespace, words: int) -> dict[str, Measured]:
    draw = random.Random(0)
    prompt, context, tokens = (
        [draw.randrange(3, words) for _ in range(n)] for n in (options.prompt, options.context, options.tokens)
    )
    settings = {"threads": options.threads, "static_cache": options.cache == "static", "recipe": options.recipe,
                "calibration": context}  # fmt: skip
    running: dict[str, Process] = {}
    found: dict[str, Measured] = {}
    try:
        expected = None
        for name in options.variants:
            print(f"setting up {name}", file=sys.stderr)
            process = Process(name, folder, python_of(name, options), "peers.generation")
            running[name] = process
            try:
                answer = process.ask("setup", **settings)
                if "error" not in answer:
                    process.ask("prefill", ids=prompt)
                    process.ask("decode", context=context, ids=tokens)
            except RuntimeError as error:
                answer = {"error": str(error)}
            found[name] = Measured(answer.get("error", ""))
            if found[name].error:
                running.pop(name).end()
                continue
            expected = answer["logits"] if expected is None else expected
            found[name].sqnr = sqnr(expected, answer["logits"])
            found[name].resident = process.ask("memory")["bytes"]
        for _ in range(options.slices):
            for name, process in running.items():
                decode = functools.partial(process.ask, "decode", context=context, ids=tokens)
                found[name].decode.append(undisturbed(decode)["ms"])
                found[name].prefill.append(undisturbed(functools.partial(process.ask, "prefill", ids=prompt))["ms"])
        return found
    finally:
        for process in running.values():
            process.end()


def python_of(variant: str, options: argparse.Namespace) -> str:
    of_peers = {"torchao": options.compile_python, "OpenVINO": options.openvino_python, "llama": options.llama_python}
    return next((python for start, python in of_peers.items() if variant.startswith(start)), sys.executable)


def table(found: dict[str, Measured], read: int, bandwidth: float) -> str:
    ran = {name: m for name, m in found.items() if m.decode}
    first = next(iter(ran.values()), None)
    lines = []
    for name, m in ran.items():
        assert first is not None
        speedups = [a / b for a, b in zip(first.decode, m.decode, strict=True)]
        lines.append([
            name, _spread([1e3 / ms for ms in m.decode]), _spread(speedups, 2), f"{m.per_token:.2f}",
            f"{read / (m.per_token * 1e6) / bandwidth:.0%}", _spread(m.prefill), f"{m.resident / 1e6:,.0f}",
            f"{m.sqnr:.1f}",
        ])  # fmt: skip
    head = ["", "decode, tokens/s", f"x {next(iter(ran), '')}", "ms/token", "of the bandwidth", "prefill, ms",
            "resident, MB", "dB"]  # fmt: skip
    return tabulate(lines, head, tablefmt="github", disable_numparse=True)


def _spread(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="160M")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), help="the first: what others are compared to")
    parser.add_argument("--recipe", choices=("dynamic", "static", "weight_only"), default="dynamic", help="of dbrq")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic", help="of eager models and dbrq")
    parser.add_argument("--context", type=int, default=64, help="tokens in the cache before decoding starts")
    parser.add_argument("--tokens", type=int, default=32, help="decoded in a slice")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of prefill")
    parser.add_argument("--slices", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    for peer in ("compile", "openvino", "llama"):
        parser.add_argument(f"--{peer}-python", default=sys.executable, help="of an environment that has it")
    parser.add_argument("--json", type=Path, help="where to write JSON")
    options = parser.parse_args()
    unknown = [name for name in options.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    from machine import bandwidth

    with tempfile.TemporaryDirectory() as folder:
        model = written(options.model, folder)
        read, words = int8_bytes(model), model.config.vocab_size
        count = sum(p.numel() for p in model.parameters())
        del model
        before = bandwidth(options.threads)
        found = measure(folder, options, words)
        speed = max(before, _again(bandwidth, options.threads))
    print(f"{cpu()}, {options.threads} threads, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, "
          f"Python {platform.python_version()}")  # fmt: skip
    print(f"Llama-like, {count / 1e6:.0f} M parameters; {options.cache} cache, {options.recipe} recipe, "
          f"{options.context} tokens before, prompt of {options.prompt}")  # fmt: skip
    print(f"memory is read at {speed:.1f} GB/s; a token reads {read / 1e6:.1f} MB of int8 weights: "
          f"{speed * 1e9 / read:.1f} tokens/s at most\n")  # fmt: skip
    print(table(found, read, speed))
    for name, m in found.items():
        if m.error:
            print(f"\n{name} did not run: {m.error}")
    if options.json:
        facts: dict[str, Any] = {"cpu": cpu(), "date": time.strftime("%Y-%m-%d"), "bandwidth": speed, "bytes": read}
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if "python" not in k}
        facts |= {"options": settings, "variants": {name: asdict(m) for name, m in found.items()}}
        options.json.write_text(json.dumps(facts, indent=1))


def _again(measured: Any, threads: int) -> float:
    measured.cache_clear()
    return measured(threads)


if __name__ == "__main__":
    main()
