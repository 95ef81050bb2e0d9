"""Generation with transformers: every decoder calls its model with growing caches, which is another path each time.

Tiny configurations with random weights; nothing is downloaded. A model is prepared with one forward, calibrated by
generating (greedily, and by beam search over padded prompts), and then generates from other prompts, longer ones too.
"""

import copy
import functools
import os
import threading
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping
from torch.autograd.profiler import profile

import dbrq
from dbrq.hidden_state import lowered_of
from tests.helpers.judging import sqnr

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which the functions below do
VOCABULARY = 96
#: dB against float: of the first token's logits, and of those that follow from caches, given equal tokens.
FIRST, LATER = 20, 15
IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.12}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.12}
NEOX = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "initializer_range": 0.12}  # fmt: skip
LLAMA = {**NEOX, "num_key_value_heads": 2}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
        "init_std": 0.12, "decoder_start_token_id": 2, "forced_eos_token_id": None}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
#: model type -> configuration.
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gptj": {**GPT2, "rotary_dim": 4},
    "codegen": {**GPT2, "rotary_dim": 4},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                "window_size": 8, "max_position_embeddings": 64, "initializer_range": 0.12},
    "gpt_neox": NEOX,
    "opt": {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "init_std": 0.12,
            "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    "bloom": BLOOM,
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 8},
    "qwen2": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 8},
    "phi": NEOX,
    "gemma": {**LLAMA, "head_dim": 8},
    "gemma2": {**LLAMA, "head_dim": 8, "sliding_window": 8},
    "falcon": NEOX,
    "stablelm": LLAMA,
    "olmo": NEOX,
    "mixtral": {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 2},  # both chosen: no ties to decide
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "initializer_range": 0.12},
}  # fmt: skip
ENCODER_DECODERS: dict[str, dict[str, Any]] = {"t5": T5, "bart": BART, "marian": BART, "pegasus": BART}
CONFIGURATIONS = {**DECODERS, **ENCODER_DECODERS}
RECIPES: dict[str, QConfigMapping | None] = {
    "static": None,
    "dynamic": dbrq.dynamic_qconfig_mapping(),
}
models = pytest.mark.parametrize("name", list(CONFIGURATIONS))
recipes = pytest.mark.parametrize("recipe", list(RECIPES))


def prompts(batch: int, length: int, seed: int, padding: int = 0) -> dict[str, Tensor]:
    """Token ids and attention mask; row k is padded on the left by up to ``padding`` tokens, the last one not."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch - 1):
        ids[row, : padding - row] = 0
        mask[row, : padding - row] = 0
    return {"input_ids": ids, "attention_mask": mask} if padding else {"input_ids": ids}


@functools.cache
def float_model(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    configuration = AutoConfig.for_model(name, **CONFIGURATIONS[name], **IDS)
    kind = AutoModelForCausalLM if name in DECODERS else AutoModelForSeq2SeqLM
    configuration._experts_implementation = "eager"  # layers one by one, which run in int8; grouped products do not
    return kind.from_config(configuration).eval()


def example(name: str, batch: int = 12, length: int = 20) -> dict[str, Tensor]:
    inputs = prompts(batch, length, seed=1)
    if name in ENCODER_DECODERS:
        inputs["decoder_input_ids"] = prompts(batch, length, seed=2)["input_ids"]
    return inputs


CALIBRATION = [
    (prompts(4, 12, seed=3), {"max_new_tokens": 4}),
    (prompts(3, 10, seed=4, padding=4), {"max_new_tokens": 4, "num_beams": 2}),
]


def generate(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> Any:
    """``max_new_tokens`` new tokens, no fewer."""
    options = {"do_sample": False, "min_new_tokens": options["max_new_tokens"], **options}
    return model.generate(**copy.deepcopy(inputs), **options)


@functools.cache
def calibrated(name: str, recipe: str) -> tuple[nn.Module, list[Tensor], list[str]]:
    """The prepared model, not to be run again; what it generated while calibrating; what it warned of."""
    prepared = dbrq.prepare(float_model(name), example(name), RECIPES[recipe])
    with torch.no_grad():
        prepared(**example(name))
    done = [heard(generate, prepared, inputs, **options) for inputs, options in CALIBRATION]
    return prepared, [output for output, _ in done], [text for _, texts in done for text in texts]


@functools.cache
def quantized_model(name: str, recipe: str = "static") -> nn.Module:
    return dbrq.convert(calibrated(name, recipe)[0])


def heard(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """The result of one call, and the texts of dbrq's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args, **kwargs)
    return result, [str(w.message) for w in caught if str(w.message).startswith("dbrq")]


class Forced:
    """A logits processor that lets nothing but given tokens be next, so that two models generate the same text."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.step = tokens, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = torch.full_like(scores, -float("inf"))
        scores.scatter_(1, self.tokens[:, self.step, None], 0.0)
        self.step += 1
        return scores


def logits_along(model: nn.Module, inputs: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, ...]:
    """The logits of each step while generating ``tokens``."""
    return generate(
        model, inputs, max_new_tokens=tokens.shape[1], logits_processor=[Forced(tokens)], output_logits=True,
        return_dict_in_generate=True,
    ).logits  # fmt: skip


#: What is generated: prompts of other lengths and batches, more tokens, other beams than in calibration.
GENERATIONS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "greedy, as calibrated": CALIBRATION[0],
    "greedy, longer": (prompts(2, 17, seed=5), {"max_new_tokens": 7}),
    "greedy, shorter": (prompts(1, 5, seed=6), {"max_new_tokens": 2}),
    "greedy, padded": (prompts(3, 14, seed=8, padding=6), {"max_new_tokens": 5}),
    "beam": (prompts(2, 8, seed=9), {"max_new_tokens": 6, "num_beams": 3}),
    "beam, padded": (prompts(3, 15, seed=10, padding=3), {"max_new_tokens": 3, "num_beams": 2}),
}


@functools.cache
def generated(name: str, what: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What the float model generates, and its logits at every step."""
    inputs, options = GENERATIONS[what]
    result = generate(float_model(name), inputs, output_logits=True, return_dict_in_generate=True, **options)
    return result.sequences, result.logits


@models
@recipes
def test_generation_is_silent_and_of_the_same_shape(name, recipe):
    quantized = quantized_model(name, recipe)
    for what, (inputs, options) in GENERATIONS.items():
        got, messages = heard(generate, quantized, inputs, **options)
        assert not messages, f"{what}: {messages[:5]}"
        expected, _ = generated(name, what)
        assert type(got) is Tensor and got.shape == expected.shape and got.dtype == expected.dtype, what


@models
@recipes
def test_logits_are_close_to_float_at_every_step(name, recipe):
    """Along the tokens that the float model generates."""
    quantized = quantized_model(name, recipe)
    for what in ("greedy, as calibrated", "greedy, longer", "greedy, padded"):
        inputs, options = GENERATIONS[what]
        sequences, expected = generated(name, what)
        got = logits_along(quantized, inputs, sequences[:, -options["max_new_tokens"] :])
        decibels = [sqnr(a, b) for a, b in zip(expected, got, strict=True)]
        assert decibels[0] >= FIRST and min(decibels) >= LATER, f"{what}: {decibels}"


@models
def test_calibration_generates_what_float_does(name):
    _, outputs, messages = calibrated(name, "static")
    assert not messages
    for got, (inputs, options) in zip(outputs, CALIBRATION, strict=True):
        assert torch.equal(got, generate(float_model(name), inputs, **options))


@models
@recipes
def test_layers_run_in_int8_with_and_without_cache(name, recipe):
    model, quantized = float_model(name), quantized_model(name, recipe)
    assert dbrq.report(quantized).coverage > 0.9, str(dbrq.report(quantized))
    inputs, options = GENERATIONS["greedy, shorter"]
    before, after = (kernel_calls(m, inputs, **options) for m in (model, quantized))
    assert before[0] == 0 and before[1] > 0
    assert after[1] == 0 or recipe == "dynamic", f"{after[1]} of {before[1]} calls of linear layers ran in float"
    assert after[0] >= before[1] - after[1] > before[1] / 2


def kernel_calls(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> tuple[int, int]:
    """How many linear layers and convolutions one generation computes in int8, and how many in float."""
    with profile() as profiled:
        generate(model, inputs, **options)
    names = Counter(event.name for event in profiled.function_events)
    int8 = sum(count for name, count in names.items() if name in ("onednn::qlinear_pointwise",
               "onednn::qconv_pointwise", "onednn::qconv1d_pointwise", "onednn::qconv2d_pointwise"))  # fmt: skip
    return int8, names["aten::linear"] + names["aten::convolution"]


FEW = ["llama", "gpt2", "t5", "mamba"]
few = pytest.mark.parametrize("name", FEW)


@few
def test_strict_generates_what_was_calibrated(name):
    strict = dbrq.convert(calibrated(name, "static")[0], strict=True)
    for inputs, options in CALIBRATION:
        assert torch.equal(generate(strict, inputs, **options), generate(quantized_model(name), inputs, **options))


@few
def test_sampling(name):
    inputs, quantized = prompts(2, 9, seed=11), quantized_model(name)
    torch.manual_seed(3)
    got, messages = heard(generate, quantized, inputs, max_new_tokens=5, do_sample=True, top_k=20)
    torch.manual_seed(3)
    again = generate(quantized, inputs, max_new_tokens=5, do_sample=True, top_k=20)
    assert torch.equal(got, again) and not messages
    assert got.shape == generate(float_model(name), inputs, max_new_tokens=5).shape


@few
def test_without_cache(name):
    """Calibration never did it; whatever it warns of, it works."""
    inputs, quantized = prompts(2, 9, seed=12), quantized_model(name)
    got, _ = heard(generate, quantized, inputs, max_new_tokens=4, use_cache=False)
    assert got.shape == generate(float_model(name), inputs, max_new_tokens=4, use_cache=False).shape


@few
def test_a_loaded_model_generates_the_same(name, tmp_path):
    quantized = quantized_model(name)
    dbrq.save(quantized, tmp_path / "model.pt")
    for other in (dbrq.load(tmp_path / "model.pt"), copy.deepcopy(quantized)):
        for what in ("greedy, longer", "beam, padded"):
            inputs, options = GENERATIONS[what]
            got, messages = heard(generate, other, inputs, **options)
            assert torch.equal(got, generate(quantized, inputs, **options)) and not messages


@few
def test_threads_generate_side_by_side(name):
    quantized, wrong = quantized_model(name), []
    chosen = [GENERATIONS[what] for what in ("greedy, longer", "beam", "greedy, padded")]
    expected = [generate(quantized, inputs, **options) for inputs, options in chosen]

    def work(number: int) -> None:
        try:
            inputs, options = chosen[number]
            for _ in range(2):
                assert torch.equal(generate(quantized, inputs, **options), expected[number])
        except BaseException as error:
            wrong.append((number, error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(chosen))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


@few
def test_paths_of_generation_are_reported(name):
    prepared, quantized = calibrated(name, "static")[0], quantized_model(name)
    root = [row for row in dbrq.report(quantized).paths if row.module == "" and row.call == 0]
    assert [row.number for row in root] == list(range(len(root)))
    forwards = 1 + sum(options["max_new_tokens"] for _, options in CALIBRATION)
    assert sum(row.seen for row in root) == forwards
    assert dbrq.report(prepared).paths


def tokenizer() -> Any:
    """One token for each word "w3", "w4", ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCABULARY))]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


@recipes
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_pipeline_takes_a_quantized_model(name, recipe):
    from transformers import pipeline

    texts = ["w5 w6 w7", "w9 w4 w30 w31 w8"]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "return_full_text": False}
    results = []
    for model in (float_model(name), quantized_model(name, recipe)):
        writer = pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
        assert writer.model is model
        one, messages = heard(writer, texts[0], **options)
        assert not messages
        both, messages = heard(writer, texts, batch_size=2, **options)
        assert not messages
        results.append([one[0], *(item[0] for item in both)])
    for expected, got in zip(*results, strict=True):
        assert list(got) == list(expected) == ["generated_text"]
        assert len(got["generated_text"].split()) == len(expected["generated_text"].split()) == 5


# Lowered: caches go in and out, and what grows makes no new plans

LOWERED = [*FEW, "gemma2", "bart"]
lowered_models = pytest.mark.parametrize("name", LOWERED)


@functools.cache
def lowered_model(name: str) -> nn.Module:
    return dbrq.lower(quantized_model(name), example(name, 1, 9), backend="onednn")


@lowered_models
def test_lowered_models_generate_what_converted_ones_do(name):
    lowered, quantized = lowered_model(name), quantized_model(name)
    assert type(lowered) is type(quantized) and lowered.config is not None
    for what in ("greedy, longer", "greedy, padded", "beam"):
        inputs, options = GENERATIONS[what]
        got, messages = heard(generate, lowered, inputs, **options)
        assert torch.equal(got, generate(quantized, inputs, **options)) and not messages, (what, messages)


@lowered_models
def test_logits_of_lowered_models(name):
    inputs, options = GENERATIONS["greedy, longer"]
    tokens = generate(quantized_model(name), inputs, **options)[:, -options["max_new_tokens"] :]
    expected, got = (logits_along(model, inputs, tokens) for model in (quantized_model(name), lowered_model(name)))
    assert min(sqnr(a, b) for a, b in zip(expected, got, strict=True)) > 30


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_k": 20},
        {"cache_implementation": "static"},
        {"num_beams": 3, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_ways_to_generate_lowered(options):
    inputs = prompts(1 if "prompt_lookup_num_tokens" in options else 2, 9, seed=5)
    found = []
    for model in (quantized_model("llama"), lowered_model("llama")):
        torch.manual_seed(3)
        found.append(heard(generate, model, inputs, max_new_tokens=6, **options))
    (expected, _), (got, messages) = found
    assert torch.equal(expected, got) and not messages


def test_a_longer_cache_makes_no_plans():
    lowered = copy.deepcopy(lowered_model("llama"))
    generate(lowered, prompts(1, 9, seed=5), max_new_tokens=3)
    made = [graph.plans for graph in lowered_of(lowered).models]
    generate(lowered, prompts(1, 9, seed=6), max_new_tokens=30)
    assert [graph.plans for graph in lowered_of(lowered).models] == made
