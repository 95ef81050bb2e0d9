"""Converted models of transformers in folders of their own, and in pipelines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import dbrq

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which the functions below do
pytest.importorskip("transformers")

IDS = torch.arange(3, 19).view(2, 8)


def bert(labels: int = 3) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=60,
                   max_position_embeddings=32, num_labels=labels)
    ).eval()  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=60, n_positions=32,
                                      bos_token_id=1, eos_token_id=2)).eval()  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                        num_attention_heads=4, num_key_value_heads=2, vocab_size=60,
                                        tie_word_embeddings=True)).eval()  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                                               intermediate_size=64, image_size=32, patch_size=8)).eval()  # fmt: skip


MODELS = {
    "bert": (bert, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}),
    "gpt2": (gpt2, {"input_ids": IDS}),
    "llama": (llama, {"input_ids": IDS}),
    "vit": (vit, {"pixel_values": torch.randn(2, 3, 32, 32)}),
}


def quantized(name: str, **options) -> nn.Module:
    make, x = MODELS[name]
    return dbrq.quantize(make(), [x], progress=False, **options)


def logits(model: nn.Module, name: str) -> torch.Tensor:
    with torch.no_grad():
        return model(**MODELS[name][1]).logits


def saved(folder: Path, name: str = "bert", **options) -> nn.Module:
    model = quantized(name, **options)
    model.save_pretrained(folder)
    return model


def damage(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_back_is_the_model(name, tmp_path):
    model = saved(tmp_path, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = dbrq.from_pretrained(tmp_path)
        assert logits(again, name).equal(logits(model, name))
    assert type(again) is type(model) and not again.training
    assert str(dbrq.report(again)) == str(dbrq.report(model))
    state, expected = again.state_dict(), model.state_dict()
    assert state.keys() == expected.keys() and all(state[key].equal(expected[key]) for key in state)
    assert {path for path, _ in again.named_parameters()} == {path for path, _ in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [{"exclude": ["*.attention.*", "classifier"]}, {"qconfig_mapping": "dynamic"}, {"qconfig_mapping": "reduced"}],
    ids=str,
)
def test_recipes_come_back_too(options, tmp_path):
    from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig

    mappings = {"dynamic": QConfigMapping().set_global(default_dynamic_qconfig),
                "reduced": dbrq.default_qconfig_mapping(reduce_range=True)}  # fmt: skip
    options = {k: mappings.get(v, v) if isinstance(v, str) else v for k, v in options.items()}
    model = saved(tmp_path, "bert", **options)
    again = dbrq.from_pretrained(tmp_path)
    assert logits(again, "bert").equal(logits(model, "bert"))
    assert [(r.path, r.reason) for r in dbrq.report(again).rows] == [
        (r.path, r.reason) for r in dbrq.report(model).rows
    ]


def test_the_folder_holds_no_pickle(tmp_path):
    saved(tmp_path, "gpt2")
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "int8.safetensors"}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    from safetensors import safe_open

    with safe_open(tmp_path / "int8.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} >= {torch.int8, torch.float32}  # noqa: SIM118


def test_saving_changes_nothing_in_the_model(tmp_path):
    model = quantized("bert")
    before = model.config.to_dict()
    expected = logits(model, "bert")
    model.save_pretrained(tmp_path)
    assert model.config.to_dict() == before and logits(model, "bert").equal(expected)


def test_what_came_back_goes_on_as_the_model_does(tmp_path):
    model = saved(tmp_path / "one")
    again = dbrq.from_pretrained(tmp_path / "one")
    again.save_pretrained(tmp_path / "two")
    assert logits(dbrq.from_pretrained(tmp_path / "two"), "bert").equal(logits(model, "bert"))
    graph = dbrq.rewrite(again, MODELS["bert"][1])
    assert "int8" in str(dbrq.report(dbrq.lower(again, MODELS["bert"][1]))) and graph is not None
    model.load_state_dict(again.state_dict())


def test_paths_of_calibration_and_generation_come_back(tmp_path):
    prepared = dbrq.prepare(gpt2(), {"input_ids": IDS, "use_cache": True})
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    prepared.generate(IDS, **options)
    model = dbrq.convert(prepared, strict=True)
    model.save_pretrained(tmp_path)
    again = dbrq.from_pretrained(tmp_path)
    assert again.generate(IDS, **options).equal(model.generate(IDS, **options))
    assert again.generation_config.to_dict() == model.generation_config.to_dict()


def test_another_process_reads_it(tmp_path):
    model = saved(tmp_path / "model")
    torch.save({"logits": logits(model, "bert"), "x": MODELS["bert"][1]}, tmp_path / "run.pt")
    code = (
        "import sys; sys.modules['torchvision'] = None\nimport torch, dbrq\n"
        f"model, run = dbrq.from_pretrained({str(tmp_path / 'model')!r}), torch.load({str(tmp_path / 'run.pt')!r})\n"
        "with torch.no_grad(): assert model(**run['x']).logits.equal(run['logits'])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_transformers_refuses_the_folder_and_makes_no_random_weights(tmp_path):
    saved(tmp_path)
    with pytest.raises(OSError, match="safetensors"):
        type(bert()).from_pretrained(tmp_path)


# Refusals


def test_lowered_models_and_parts_name_dbrq_save(tmp_path):
    model = quantized("bert")
    with pytest.raises(dbrq.QuantizationError, match=r"dbrq\.save"):
        model.bert.save_pretrained(tmp_path)
    lowered = dbrq.lower(model, MODELS["bert"][1])
    with pytest.raises((AttributeError, dbrq.QuantizationError)):
        lowered.save_pretrained(tmp_path)


def test_lowered_to_a_python_backend(tmp_path):
    from dbrq.lowering.lowered_model import LoweredModel

    lowered = dbrq.lower(quantized("bert"), MODELS["bert"][1], backend="onednn")
    with pytest.raises(dbrq.QuantizationError, match=r"(?s)it was lowered.*dbrq\.save"):
        lowered.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    with pytest.raises(dbrq.QuantizationError, match=r"dbrq\.save"):
        LoweredModel.save_pretrained(object(), "folder")  # type: ignore[arg-type]


def test_what_is_asked_beside_a_folder_is_refused(tmp_path):
    model = quantized("bert")
    with pytest.raises(dbrq.QuantizationError, match="push_to_hub"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other").exists()


def test_a_float_model_s_own_save_pretrained_is_left_alone(tmp_path):
    model = bert()
    dbrq.quantize(model, [MODELS["bert"][1]], progress=False)
    model.save_pretrained(tmp_path)
    assert logits(type(model).from_pretrained(tmp_path), "bert").equal(logits(model, "bert"))
    with pytest.raises(dbrq.LoadError, match="not hold a model that dbrq converted"):
        dbrq.from_pretrained(tmp_path)


def test_hooks_are_code_and_are_refused(tmp_path):
    model = bert()
    model.bert.encoder.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(dbrq.QuantizationError, match="hooks"):
        dbrq.quantize(model, [MODELS["bert"][1]], progress=False).save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_classes_of_others_have_to_be_allowed(tmp_path):
    class Mine(type(bert())):
        pass

    model = dbrq.quantize(Mine(bert().config).eval(), [MODELS["bert"][1]], progress=False)
    model.save_pretrained(tmp_path)
    with pytest.raises(dbrq.LoadError, match=r"allow=\(Mine,\)"):
        dbrq.from_pretrained(tmp_path)
    assert logits(dbrq.from_pretrained(tmp_path, allow=(Mine,)), "bert").equal(logits(model, "bert"))


@pytest.mark.parametrize(
    "architectures",
    [["os"], ["AutoModel"], ["pipeline"], ["BertModle"], [], ["BertModel", "os"], "BertModel", None, [3]],
)
def test_names_that_are_no_models_are_refused(architectures, tmp_path):
    saved(tmp_path)
    damage(tmp_path / "config.json", lambda c: c.update(architectures=architectures))
    with pytest.raises(dbrq.LoadError):
        dbrq.from_pretrained(tmp_path)


def test_another_class_or_size_is_told(tmp_path):
    saved(tmp_path)
    damage(tmp_path / "config.json", lambda c: c.update(architectures=["BertForTokenClassification"]))
    with pytest.raises(dbrq.LoadError, match="structure"):
        dbrq.from_pretrained(tmp_path)
    damage(
        tmp_path / "config.json", lambda c: c.update(architectures=["BertForSequenceClassification"], hidden_size=16)
    )
    with pytest.raises(dbrq.LoadError):
        dbrq.from_pretrained(tmp_path)
    damage(tmp_path / "config.json", lambda c: c.update(hidden_size=32, num_hidden_layers=1))
    with pytest.raises(dbrq.LoadError, match="structure"):
        dbrq.from_pretrained(tmp_path)


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        dbrq.from_pretrained(tmp_path)
    saved(tmp_path)
    weights = tmp_path / "int8.safetensors"
    whole = weights.read_bytes()
    for changed in (b"", whole[:100], whole[:-40], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
                    whole.replace(b"int8", b"int9", 1), b"\x80\x02" + whole):  # fmt: skip
        weights.write_bytes(changed)
        with pytest.raises(dbrq.LoadError):
            dbrq.from_pretrained(tmp_path)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"int8\.safetensors"):
        dbrq.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(dbrq.LoadError):
        dbrq.from_pretrained(tmp_path)


def test_another_version_of_transformers_is_told(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setattr("transformers.__version__", "5.99")
    with pytest.warns(UserWarning, match=r"here is 5\.99"):
        dbrq.from_pretrained(tmp_path)


# Pipelines


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, 60))]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("again", [False, True], ids=["converted", "from its folder"])
def test_a_pipeline_runs_a_converted_model(again, tmp_path):
    from transformers import pipeline

    model = saved(tmp_path)
    model = dbrq.from_pretrained(tmp_path) if again else model
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer(), device="cpu")
    assert classify.model is model
    results = classify(["w3 w4 w5", "w9 w8"])
    for text, result in zip(["w3 w4 w5", "w9 w8"], results, strict=True):
        with torch.no_grad():
            scores = model(**tokenizer()(text, return_tensors="pt")).logits.softmax(-1)
        assert result["score"] == pytest.approx(scores.max().item(), abs=1e-5)
        assert result["label"] == f"LABEL_{scores.argmax().item()}"


def test_a_pipeline_s_tokenizer_calibrates():
    texts = tokenizer()(["w3 w4 w5", "w9 w8 w7"], return_tensors="pt")
    assert dbrq.report(dbrq.quantize(bert(), [texts], progress=False)).coverage == 1.0
