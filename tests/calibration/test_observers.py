"""What observers must find, keep and refuse."""

import copy
import math
import operator
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.ao import quantization as ao

from dbrq.calibration.observers import HistogramObserver, default_qconfig_mapping, observed
from dbrq.errors import CalibrationError, ConfigurationError, NotCalibratedError
from dbrq.kernels import has_exact_int8_dot


def samples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    n = 1 << 17
    chi = torch.stack([normal(n) ** 2 for _ in range(3)]).mean(0)
    layer_norm = F.layer_norm(normal(200, 768), (768,))
    layer_norm[:, 5] *= 30
    layer_norm[:, 77] = layer_norm[:, 77] * 10 + 20
    return {
        "gaussian": normal(n),
        "relu": normal(n).relu(),
        "relu6": (4 * normal(n)).clamp(0, 6),
        "student_t": normal(n) / chi.sqrt(),
        "layer_norm": layer_norm,
        "gelu": F.gelu(2 * normal(n)),
        "silu": F.silu(normal(n)),
        "sigmoid": torch.sigmoid(3 * normal(n)),
        "softmax": torch.softmax(3 * normal(2048, 64), -1),
        "negative": -normal(n).relu() - 3,
        "mostly_zero": (normal(n) - 2.5).relu(),
        "one_outlier": torch.cat([normal(n), torch.tensor([1e4])]),
        "few": normal(100),
    }


SAMPLES = samples()


def watch(*batches: Tensor, **kwargs: Any) -> HistogramObserver:
    observer = HistogramObserver(**kwargs)
    for batch in batches:
        assert observer(batch) is batch
    return observer


def error(x: Tensor, observer: Any) -> float:
    """The mean squared error of ``x`` quantized as the observer says."""
    scale, zero_point = (value.double() for value in observer.calculate_qparams())
    q = (x.double() / scale + zero_point).round().clamp(observer.quant_min, observer.quant_max)
    return ((q - zero_point) * scale - x).square().mean().item()


def state(observer: HistogramObserver) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in observer.state_dict().items()}


def same_state(a: HistogramObserver, b: HistogramObserver) -> bool:
    return all(torch.equal(x, y) for x, y in zip(state(a).values(), state(b).values(), strict=True))


# What it finds


@pytest.mark.parametrize("reduce_range", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_error_is_no_larger_than_that_of_torch_ao(name: str, reduce_range: bool) -> None:
    x = SAMPLES[name]
    ours = error(x, watch(x, reduce_range=reduce_range))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao's opinion of reduce_range
        for other in (ao.HistogramObserver(reduce_range=reduce_range), ao.MinMaxObserver(reduce_range=reduce_range)):
            other(x)
            assert ours <= 1.005 * error(x, other), type(other).__name__


@pytest.mark.parametrize("name", ["gaussian", "student_t", "relu", "gelu", "layer_norm"])
def test_no_range_is_much_better(name: str) -> None:
    x = SAMPLES[name]
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
    found = error(x, watch(x))
    for shrink_low in torch.logspace(0, -1.5, 16).tolist():
        for shrink_high in torch.logspace(0, -1.5, 16).tolist():
            scale = (high * shrink_high - low * shrink_low) / 255
            zero_point = min(max(round(-low * shrink_low / scale), 0), 255)
            q = (x / scale + zero_point).round_().clamp_(0, 255)
            assert found <= 1.01 * (q - zero_point).mul_(scale).sub_(x).square_().mean().item()


def test_values_on_a_grid_are_exact() -> None:
    assert error(torch.tensor([0.0, 1.0]), watch(torch.tensor([0.0, 1.0]))) < 1e-12
    assert error(torch.arange(256.0), watch(torch.arange(256.0))) < 1e-6


@pytest.mark.parametrize("value", [5.0, -3.0, 1e-30, -1e-5, 3e38, 1.0])
def test_constant_input(value: float) -> None:
    eps = torch.finfo(torch.float32).eps
    for x in (torch.full((4, 4), value), torch.tensor(value), torch.tensor([value])):
        observer = watch(x)
        scale, zero_point = observer.calculate_qparams()
        assert 0 < scale.item() < math.inf
        assert 0 <= zero_point.item() <= 255
        assert error(x, observer) <= (1e-6 * value) ** 2 + eps**2


def test_zero_and_values_that_are_as_good_as_zero_get_scale_one() -> None:
    for x in (torch.zeros(3, 3), torch.tensor(-0.0), torch.tensor([1e-9, -1e-9])):
        scale, zero_point = watch(x).calculate_qparams()
        assert (scale.item(), zero_point.item()) == (1.0, 0)


@pytest.mark.parametrize("dtype", [torch.quint8, torch.uint8, torch.qint8, torch.int8])
def test_integer_range(dtype: torch.dtype) -> None:
    info, x = torch.iinfo(dtype), SAMPLES["gaussian"]
    whole, reduced = watch(x, dtype=dtype), watch(x, dtype=dtype, reduce_range=True)
    assert (whole.quant_min, whole.quant_max) == (info.min, info.max)
    assert (reduced.quant_min, reduced.quant_max) == (info.min // 2, info.max // 2)
    custom = watch(x, dtype=dtype, quant_min=0, quant_max=100)
    assert (custom.quant_min, custom.quant_max) == (0, 100)
    for observer in (whole, reduced, custom):
        assert observer.dtype is dtype
        assert observer.quant_min < observer.calculate_qparams()[1].item() < observer.quant_max


def test_qparams_have_the_types_of_torch_ao() -> None:
    theirs = ao.HistogramObserver()
    theirs(SAMPLES["few"])
    for a, b in zip(watch(SAMPLES["few"]).calculate_qparams(), theirs.calculate_qparams(), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_eps_bounds_the_scale() -> None:
    assert watch(torch.tensor([1e-3]), eps=1e-4).calculate_qparams()[0].item() == pytest.approx(1e-4)


# What it keeps


def test_histogram_counts_every_value() -> None:
    observer = watch(torch.tensor([-1.5, -0.1, 0.0, 0.1, 1.5, 1.5]), bins=16)
    # The range is +-2, a bin 0.25 wide.
    assert observer.histogram.tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 2, 0]
    assert (observer.min_val.item(), observer.max_val.item()) == (-1.5, 1.5)


@pytest.mark.parametrize("bins", [16, 2048, 8192])
@pytest.mark.parametrize("n", [1, 1000, 200_000])
def test_relu_outputs_are_counted_like_others(n: int, bins: int) -> None:
    # Zeros take a way of their own if nothing is negative.
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).relu()
    with_negative = watch(torch.cat([x, torch.tensor([-1e-3])]), bins=bins)
    plain = watch(x, torch.tensor([-1e-3]), bins=bins)
    assert same_state(plain, with_negative)
    assert int(plain.histogram.sum()) == n + 1


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_batches_in_any_order_are_the_same_as_all_at_once(order: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    scales = (1e-4, -0.3, 1.0, -7.0, 300.0)  # the range grows on both sides, and by many powers of two
    batches = [scale * torch.randn(5000, generator=generator).abs() for scale in scales]
    merged, at_once = watch(*[batches[i] for i in order]), watch(torch.cat(batches))
    assert same_state(merged, at_once)
    assert merged.calculate_qparams() == at_once.calculate_qparams()


def test_zeros_seen_first_do_not_set_the_range() -> None:
    small = torch.tensor([1e-3, 2e-3])
    assert same_state(watch(torch.zeros(4), small), watch(torch.cat([small, torch.zeros(4)])))


def test_extremes_of_float32() -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([-largest, -1e-45, 0.0, 1e-45, 1.0, largest])
    observer = watch(x[1:5], x)
    assert int(observer.histogram.sum()) == 10
    assert math.isfinite(observer.calculate_qparams()[0].item())


def test_layouts_and_dtypes_are_counted_alike() -> None:
    x = torch.randn(2, 8, 5, 6, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    gaps = torch.zeros(2, 16, 5, 6)
    gaps[:, ::2] = x
    channels_last = x.contiguous(memory_format=torch.channels_last)
    for other in (channels_last, gaps[:, ::2], x.transpose(1, 3), x.bfloat16(), x.double(), x.clone().requires_grad_()):
        assert same_state(watch(other), watch(x))
    assert same_state(watch(x[:1].expand(3, 8, 5, 6)), watch(x[:1].repeat(3, 1, 1, 1)))


def test_an_empty_tensor_is_ignored() -> None:
    observer = watch(torch.empty(0, 3))
    assert not observed(observer)
    seen = watch(torch.ones(2))
    before = state(seen)
    seen(torch.empty(2, 0))
    assert all(torch.equal(before[name], value) for name, value in seen.state_dict().items())


def test_calibration_in_inference_mode_goes_on_outside() -> None:
    observer = HistogramObserver()
    with torch.inference_mode():
        observer(SAMPLES["few"])
        observer(10 * SAMPLES["few"])
    observer(SAMPLES["relu"])
    assert same_state(observer, watch(SAMPLES["few"], 10 * SAMPLES["few"], SAMPLES["relu"]))


# What it refuses


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("seen", [(), (torch.linspace(-1, 3, 100),)])
def test_nan_and_infinity_raise_and_change_nothing(bad: float, seen: tuple[Tensor, ...]) -> None:
    observer = watch(*seen)
    before = state(observer)
    x = torch.linspace(-5, 5, 1000).reshape(10, 100)
    x[3, 7] = bad
    with pytest.raises(CalibrationError, match=r"not finite[\s\S]*float32 of shape \(10, 100\)[\s\S]*1"):
        observer(x)
    assert all(torch.equal(before[name], value) for name, value in observer.state_dict().items())


def test_values_beyond_float32_raise() -> None:
    with pytest.raises(CalibrationError, match="fit float32"):
        watch(torch.tensor([1e300], dtype=torch.float64))


def test_qparams_of_nothing_raise() -> None:
    with pytest.raises(NotCalibratedError, match="seen no data"):
        HistogramObserver().calculate_qparams()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"dtype": torch.qint32},
        {"dtype": torch.float16},
        {"qscheme": torch.per_tensor_symmetric},
        {"qscheme": torch.per_channel_affine},
        {"is_dynamic": True},
        {"bins": 100},
        {"bins": 0},
        {"eps": 0.0},
        {"quant_min": 0},
        {"quant_min": 0, "quant_max": 256},
        {"quant_min": 10, "quant_max": 20},
        {"quant_min": 0, "quant_max": 1, "reduce_range": True},
    ],
)
def test_unusable_arguments_raise(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        HistogramObserver(**kwargs)


# How it travels


@pytest.mark.parametrize("seen", [(), (SAMPLES["gelu"],)])
def test_copies(seen: tuple[Tensor, ...]) -> None:
    observer = watch(*seen, reduce_range=True)
    loaded = HistogramObserver(reduce_range=True)
    loaded.load_state_dict(observer.state_dict())
    for copied in (loaded, copy.deepcopy(observer), pickle.loads(pickle.dumps(observer))):
        assert same_state(copied, observer)
        assert observed(copied) == bool(seen)
        copied(torch.tensor([-50.0, 50.0]))
        assert same_state(copied, watch(*seen, torch.tensor([-50.0, 50.0])))
    assert same_state(observer, watch(*seen))


def test_state_of_another_kind_of_histogram_is_not_loaded() -> None:
    with pytest.raises(RuntimeError, match="another observer class"):
        HistogramObserver(bins=2048).load_state_dict(ao.HistogramObserver().state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        HistogramObserver().load_state_dict(HistogramObserver(bins=2048).state_dict())


def test_it_warns_of_nothing_and_prints_what_it_saw() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observer = HistogramObserver(reduce_range=True)
        assert "nothing seen" in repr(observer)
        observer(torch.tensor([-1.0, 2.5]))
        observer.calculate_qparams()
    assert repr(observer) == "HistogramObserver(seen [-1, 2.5], quant_min=0, quant_max=127)"


def test_with_args_and_fake_quantize() -> None:
    x = SAMPLES["gelu"]
    fake = ao.FakeQuantize(HistogramObserver.with_args(reduce_range=True))
    expected, zero_point = watch(x, reduce_range=True).calculate_qparams()
    assert torch.allclose(fake(x), torch.fake_quantize_per_tensor_affine(x, expected, zero_point, 0, 127))


# Around it


@pytest.mark.filterwarnings("ignore:Please use quant_min")
def test_observed() -> None:
    x = torch.ones(2, 2)
    for factory in (
        HistogramObserver,
        ao.HistogramObserver,
        ao.MinMaxObserver,
        ao.MovingAverageMinMaxObserver,
        ao.PerChannelMinMaxObserver,
        ao.default_fused_act_fake_quant,
        ao.default_fake_quant,
        ao.default_per_channel_weight_fake_quant,
    ):
        observer = factory()
        assert not observed(observer), factory
        observer(x)
        assert observed(observer), factory


def test_observers_that_need_no_data_count_as_observed() -> None:
    for factory in (
        ao.PlaceholderObserver,
        ao.default_dynamic_quant_observer,
        ao.default_fixed_qparams_range_0to1_observer,
        ao.default_fixed_qparams_range_0to1_fake_quant,
    ):
        assert observed(factory())
    assert not observed(torch.nn.Identity())


def test_default_recipe() -> None:
    mapping = default_qconfig_mapping()
    activation, weight = mapping.global_qconfig.activation(), mapping.global_qconfig.weight()
    assert isinstance(activation, HistogramObserver)
    assert activation.reduce_range is not has_exact_int8_dot()
    assert activation.dtype is torch.quint8
    assert (weight.dtype, weight.qscheme) == (torch.qint8, torch.per_channel_symmetric)
    assert mapping.global_qconfig.activation() is not activation


def test_default_recipe_leaves_matmuls_in_float() -> None:
    types = default_qconfig_mapping().object_type_qconfigs
    for matmul in (torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm", "__matmul__"):
        assert types[matmul] is None


@pytest.mark.parametrize("reduce_range", [False, True])
def test_default_recipe_reduces_the_range_on_demand(reduce_range: bool) -> None:
    activation = default_qconfig_mapping(reduce_range).global_qconfig.activation()
    assert activation.quant_max == (127 if reduce_range else 255)


@pytest.mark.parametrize("name", ["gaussian", "relu", "student_t", "layer_norm", "gelu", "one_outlier"])
def test_counting_a_sample_of_a_large_tensor_costs_no_accuracy(name):
    large = torch.cat([x.flatten() for x in [SAMPLES[name]] * 8])
    large = large[torch.randperm(large.numel(), generator=torch.Generator().manual_seed(0))]
    large = large[: large.numel() // 16 * 16].reshape(16, -1)
    in_full = watch(*large.split(1))
    assert error(large, watch(large)) <= 1.02 * error(large, in_full)
