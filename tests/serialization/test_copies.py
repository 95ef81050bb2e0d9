"""Copies, pickles, files and state dicts of models in every phase."""

import copy
import io

import pytest
import torch
from torch import nn

import dbrq
from dbrq import NotCalibratedError, QuantizationError
from tests.helpers.phases import X, in_phase, models, net, phases, pickled, torch_saved
from tests.helpers.running import convert, run

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "torch.save": torch_saved,
    "deepcopy of a copy": lambda m: copy.deepcopy(pickled(m)),
}


@models
@phases
@pytest.mark.parametrize("copied", list(COPIES.values()), ids=list(COPIES))
def test_copies_give_the_same_and_go_their_own_way(make, x, mapping, phase, copied):
    model = in_phase(phase, make, x, mapping)
    expected = run(model, x)
    other = copied(model)
    assert type(other) is type(model)
    assert torch.equal(run(other, x), expected)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1.5)
    assert torch.equal(run(model, x), expected), "the copy shares state with the original"
    assert not torch.equal(run(other, x), expected)


@models
def test_a_copy_of_a_prepared_model_calibrates_and_converts_by_itself(make, x, mapping):
    prepared = dbrq.prepare(make(), x, mapping)
    one, other = copy.deepcopy(prepared), pickled(prepared)
    run(one, x)
    converted = dbrq.convert(one)
    for untouched in (other, prepared):
        with pytest.raises(NotCalibratedError):
            dbrq.convert(untouched)
    run(other, x)
    assert torch.equal(run(dbrq.convert(other), x), run(converted, x))


def test_convert_leaves_the_prepared_model_alone():
    result = convert(net(), X)
    before = run(result.prepared, X)
    assert torch.allclose(before, run(result.model, X))
    assert torch.equal(run(dbrq.convert(result.prepared), X), run(result.quantized, X))
    run(result.prepared, X * 3)
    assert not torch.equal(run(dbrq.convert(result.prepared), X), run(result.quantized, X))


def test_inplace_changes_the_model_itself():
    model = net()
    prepared = dbrq.prepare(model, X, inplace=True)
    assert prepared is model
    run(prepared, X)
    converted = dbrq.convert(prepared, inplace=True)
    assert converted is model
    assert torch.equal(run(converted, X), run(convert(net(), X).quantized, X))


@models
@phases
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_state_dict_loads_into_a_copy_with_other_weights(make, x, mapping, phase, weights_only, assign):
    """And refreshes every plan made from it: the copy ran before."""
    source = in_phase(phase, make, x, mapping)
    expected = run(source, x)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.7)
    other_x = x * 2 if x.is_floating_point() else x.flip(0)
    target = getattr(convert(model, other_x, mapping), phase)
    assert not torch.allclose(run(target, x), expected, rtol=0.1)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    result = target.load_state_dict(torch.load(file, weights_only=weights_only), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(run(target, x), expected)
    if phase == "prepared":
        assert torch.equal(run(dbrq.convert(target), x), run(dbrq.convert(source), x))


@models
@phases
def test_state_dict_holds_tensors_only_and_no_float_copy_of_a_weight(make, x, mapping, phase):
    model = in_phase(phase, make, x, mapping)
    state = model.state_dict()
    assert all(type(value) in (torch.Tensor, nn.Parameter) for value in state.values())
    assert not any(value.is_mkldnn or value.is_quantized for value in state.values())
    if phase == "quantized":
        matrices = [name for name, t in state.items() if t.is_floating_point() and t.dim() > 1]
        assert matrices == []
        assert any(t.dtype is torch.int8 for t in state.values())


def test_a_missing_or_unexpected_key_is_told():
    model = in_phase("quantized", net, X)
    state = model.state_dict()
    expected = run(model, X)
    name = next(key for key in state if key.endswith("weight_int8"))
    del state[name]
    with pytest.raises(RuntimeError, match="weight_int8"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError):
        model.load_state_dict({**model.state_dict(), "features.0.surplus": torch.zeros(1)})
    assert torch.equal(run(model, X), expected)


def test_a_float_state_dict_does_not_load_silently():
    model = in_phase("quantized", net, X)
    with pytest.raises(RuntimeError):
        model.load_state_dict(net().state_dict())


@models
def test_save_and_load(make, x, mapping, tmp_path):
    model = in_phase("quantized", make, x, mapping)
    expected, file = run(model, x), tmp_path / "model.pt"
    dbrq.save(model, file)
    loaded = dbrq.load(file)
    assert type(loaded) is type(model)
    assert torch.equal(run(loaded, x), expected)
    assert str(dbrq.report(loaded)) == str(dbrq.report(model))
    floats = io.BytesIO()
    torch.save(make(), floats)
    big = nn.Sequential(nn.Linear(512, 512))
    dbrq.save(convert(big, torch.randn(4, 512)).quantized, file)
    assert file.stat().st_size < 0.3 * 512 * 512 * 4


def test_load_tells_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError):
        dbrq.load(tmp_path / "nothing")
    (tmp_path / "garbage").write_bytes(b"garbage")
    torch.save({"a": 1}, tmp_path / "other")
    for name in ("garbage", "other"):
        with pytest.raises(dbrq.LoadError):
            dbrq.load(tmp_path / name)
    for model in (net(), dbrq.prepare(net(), X)):
        with pytest.raises(QuantizationError):
            dbrq.save(model, tmp_path / "model")
