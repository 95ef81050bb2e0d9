"""One way to run a language model, in a process of its own: ``python -m peers.generation VARIANT FOLDER``.

FOLDER holds a model of transformers. Commands are JSON lines, as those of ``worker``: ``setup`` (which answers with the
logits of the last of some tokens), ``prefill`` and ``decode`` (milliseconds), ``memory`` (bytes). Nothing is imported
before a variant needs it: environments differ.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

#: What caches and contexts have room for.
LONGEST = 2048


class Decoder(Protocol):
    """A model with a cache."""

    def start(self, ids: Sequence[int]) -> Any:
        """Empty the cache, run a prompt, and return the logits of its last token."""

    def step(self, token: int) -> Any:
        """Run one token more."""


class Transformers:
    """A model of transformers, called directly: ``generate`` does more around each token, in the same way for all."""

    def __init__(self, model: Any, static: bool) -> None:
        from transformers import DynamicCache, StaticCache

        self.model = model
        self.new: Callable[[], Any] = functools.partial(DynamicCache, config=model.config)
        if static:
            self.new = functools.partial(StaticCache, config=model.config, max_cache_len=LONGEST)
        self.cache: Any = None

    def start(self, ids: Sequence[int]) -> Any:
        if self.cache is not None and hasattr(self.cache, "max_cache_len"):
            self.cache.reset()  # compiled graphs know this one
        else:
            self.cache = self.new()
        return self._run(ids)

    def step(self, token: int) -> Any:
        return self._run([token])

    def _run(self, ids: Sequence[int]) -> Any:
        import torch

        out = self.model(
            input_ids=torch.tensor([ids]), past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )  # fmt: skip
        self.cache = out.past_key_values
        return out.logits[0, -1].float().tolist


def _loaded(folder: str, dtype: str = "float32") -> Any:
    import models  # noqa: F401  # what transformers asks of torchvision
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def in_float(dtype: str) -> Callable[..., Decoder]:
    return lambda folder, options: Transformers(_loaded(folder, dtype), options["static_cache"])


def by_dbrq(backend: str) -> Callable[..., Decoder]:
    def make(folder: str, options: dict[str, Any]) -> Decoder:
        import torch

        import dbrq

        model = _loaded(folder)
        ids = torch.tensor([options["calibration"]])
        mapping = None
        if options["recipe"] != "static":
            mapping = dbrq.dynamic_qconfig_mapping(weight_only=options["recipe"] == "weight_only")
        prepared = dbrq.prepare(model, {"input_ids": ids}, mapping)
        settings: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        if options["static_cache"]:
            settings["cache_implementation"] = "static"
        prepared.generate(ids, **settings)
        prepared(input_ids=ids)
        quantized = dbrq.convert(prepared)
        options["bytes_per_token"] = dbrq.report(quantized).facts.bytes_per_token
        if backend == "eager":
            return Transformers(quantized, options["static_cache"])
        lowered = dbrq.lower(quantized, {"input_ids": ids}, backend=backend)
        lowered.generate(ids, **settings)
        return Transformers(lowered, options["static_cache"])

    return make


def compiled(recipe: str, dtype: str) -> Callable[..., Decoder]:
    """torchao's int8 under ``torch.compile``; with a static cache, without which each length would be compiled."""

    def make(folder: str, options: dict[str, Any]) -> Decoder:
        import torch
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

        model = _loaded(folder, dtype)
        quantize_(model, Int8WeightOnlyConfig() if recipe == "weights" else Int8DynamicActivationInt8WeightConfig())
        model.forward = torch.compile(model.forward)
        return Transformers(model, True)

    return make


class OpenVINO:
    """A stateful model, its weights in int8; the last token's logits alone are computed, as elsewhere."""

    def __init__(self, folder: str, options: dict[str, Any], settings: dict[str, str]) -> None:
        import openvino as ov

        path = _made("openvino", folder, "openvino/openvino_model.xml")
        core = ov.Core()
        model = core.read_model(path)
        self._last_logits(model)
        self.request = core.compile_model(
            model, "CPU",
            {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(options["threads"]), **settings},
        ).create_infer_request()  # fmt: skip
        self.names = {name for given in model.inputs for name in given.get_names()}
        self.length = 0

    @staticmethod
    def _last_logits(model: Any) -> None:
        from openvino import opset13 as ops

        head = model.output("logits").get_node().input_value(0).get_node()
        while head.get_type_name() != "MatMul":
            head = head.input_value(0).get_node()
        last = ops.gather(head.input_value(0), ops.constant([-1]), ops.constant(1))
        head.input(0).replace_source_output(last.output(0))
        model.validate_nodes_and_infer_types()

    def start(self, ids: Sequence[int]) -> Any:
        self.request.reset_state()
        self.length = 0
        return self._run(ids)

    def step(self, token: int) -> Any:
        return self._run([token])

    def _run(self, ids: Sequence[int]) -> Any:
        import numpy as np

        before, self.length = self.length, self.length + len(ids)
        given = {
            "input_ids": np.array([ids]), "attention_mask": np.ones((1, self.length), np.int64),
            "position_ids": np.arange(before, self.length)[None], "beam_idx": np.zeros(1, np.int32),
        }  # fmt: skip
        self.request.infer({name: array for name, array in given.items() if name in self.names})
        return self.request.get_tensor("logits").data[0, -1].tolist


def in_openvino(**settings: str) -> Callable[..., Decoder]:
    return lambda folder, options: OpenVINO(folder, options, settings)


def to_openvino(folder: str) -> None:
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(folder, export=True, load_in_8bit=True, compile=False)
    model.save_pretrained(f"{folder}/openvino")


class LlamaCpp:
    """Q8_0: int8 in groups of 32, activations too."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        from llama_cpp import Llama

        self.llama = Llama(
            _made("gguf", folder, "model.gguf"), n_ctx=LONGEST, n_batch=LONGEST, n_ubatch=512, verbose=False,
            n_threads=options["threads"], n_threads_batch=options["threads"],
        )  # fmt: skip

    def start(self, ids: Sequence[int]) -> Any:
        self.llama.reset()
        return self._run(ids)

    def step(self, token: int) -> Any:
        return self._run([token])

    def _run(self, ids: Sequence[int]) -> Any:
        import llama_cpp
        import numpy as np

        self.llama.eval(ids)
        pointer = llama_cpp.llama_get_logits_ith(self.llama.ctx, -1)
        return np.ctypeslib.as_array(pointer, (self.llama.n_vocab(),)).tolist


def to_gguf(folder: str) -> None:
    """A Llama-like model of transformers as a GGUF file without a vocabulary."""
    import gguf
    import numpy as np
    from safetensors import safe_open

    config = json.loads((Path(folder) / "config.json").read_text())
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(f"{folder}/model.gguf.part", "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no dict
                array = tensors.get_tensor(name).astype(np.float32)
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    array = _interleaved(array, heads if "q_proj" in name else groups)
                kind = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
                known = names.get_name(name, try_suffixes=(".weight",))
                writer.add_tensor(known, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(f"{folder}/model.gguf.part", f"{folder}/model.gguf")


def _interleaved(weight: Any, heads: int) -> Any:
    """Rows in the order in which llama.cpp rotates pairs: neighbours, where transformers takes halves."""
    rows, depth = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, depth).swapaxes(1, 2).reshape(rows, depth)


#: Files that are made of a model: in a process of their own, whose memory counts for nobody.
MAKERS: dict[str, Callable[[str], None]] = {"openvino": to_openvino, "gguf": to_gguf}


def _made(maker: str, folder: str, name: str) -> str:
    path = Path(folder) / name
    if not path.exists():
        made = subprocess.run(
            [sys.executable, "-m", "peers.generation", "--make", maker, folder], capture_output=True, text=True
        )
        if made.returncode:
            raise RuntimeError((made.stderr.strip().splitlines() or ["it ended"])[-1])
    return str(path)


#: Name -> what makes it of a folder and options.
VARIANTS: dict[str, Callable[[str, dict[str, Any]], Decoder]] = {
    "float32": in_float("float32"),
    "bfloat16": in_float("bfloat16"),
    "dbrq eager": by_dbrq("eager"),
    "dbrq onednn": by_dbrq("onednn"),
    "torchao int8 weights": compiled("weights", "bfloat16"),
    "torchao int8 dynamic": compiled("dynamic", "float32"),
    "OpenVINO int8": in_openvino(INFERENCE_PRECISION_HINT="f32"),
    "OpenVINO int8, its defaults": in_openvino(),
    "llama.cpp Q8_0": LlamaCpp,
}


class Worker:
    def __init__(self, variant: str, folder: str) -> None:
        self.variant, self.folder = variant, folder
        self.decoder: Decoder | None = None

    def setup(self, **options: Any) -> dict[str, Any]:
        try:
            if "torch" in sys.modules or not self.variant.startswith(("OpenVINO", "llama")):
                import torch

                torch.set_num_threads(options["threads"])
                torch.set_grad_enabled(False)
            self.decoder = VARIANTS[self.variant](self.folder, options)
            return {"logits": self.decoder.start(options["calibration"])(), "bytes": options.get("bytes_per_token", 0)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"}

    def prefill(self, ids: list[int]) -> dict[str, float]:
        assert self.decoder is not None
        cpu, start = time.process_time(), time.perf_counter()
        self.decoder.start(ids)
        return {"ms": (time.perf_counter() - start) * 1e3, "cpu": time.process_time() - cpu}

    def decode(self, context: list[int], ids: list[int]) -> dict[str, float]:
        """Milliseconds a token behind a context."""
        assert self.decoder is not None
        cpu = time.process_time()
        self.decoder.start(context)
        start = time.perf_counter()
        for token in ids:
            self.decoder.step(token)
        return {"ms": (time.perf_counter() - start) / len(ids) * 1e3, "cpu": time.process_time() - cpu}

    def memory(self) -> dict[str, int]:
        """Bytes that the process has in memory, without what it gave back and the allocator kept."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"bytes": pages * os.sysconf("SC_PAGE_SIZE")}

    def serve(self, answers: Any) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(getattr(self, request.pop("command"))(**request)), file=answers, flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    if sys.argv[1] == "--make":
        MAKERS[sys.argv[2]](sys.argv[3])
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes elsewhere
    Worker(sys.argv[1], sys.argv[2]).serve(answers)


if __name__ == "__main__":
    main()
