"""What watches activations during calibration, and the recipe that says which observer goes where.

Calibration should feel like inference, so observing costs two passes over a tensor: one for its ends, one for its
histogram. Bins have widths that are powers of two and one edge at zero; a histogram that must grow sums pairs of bins,
which is exact, so neither the order nor the number of batches changes the result.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    PlaceholderObserver,
    QConfig,
    QConfigMapping,
    default_per_channel_weight_observer,
    float_qparams_weight_only_qconfig,
)
from torch.ao.quantization.observer import UniformQuantizationObserverBase

from ..errors import CalibrationError, ConfigurationError, NotCalibratedError
from ..kernels import has_exact_int8_dot
from ..mappings import FUNCTIONS

# About as many values of a tensor with more than ``_COUNT_ALL`` are counted, since counting is what calibration spends
# its time on; it costs less than 2 % of the squared error, also with heavy tails (half as many: 4 %). The two ends of
# the range are those of all values, and where they lie this many times beyond the ends of the counted ones, what lies
# between is counted in full.
_SAMPLES = 1 << 17
_COUNT_ALL = 1 << 18
_BEYOND = 1.1
# Bins that zeros take turns in: more than a CPU keeps in flight.
_TURNS = 256
# Bins never get finer than this range asks for: the smallest scale is float32's epsilon, 2**-23.
_MIN_EXPONENT = -23

# Below this many elements, torch runs most operations on one thread.
_SERIAL = 32767
# 1.5 * 2**52: a float64 of this size has a spacing of one, so adding it rounds half to even.
_ROUND = 6755399441055744.0
# Ranges are searched in powers of two: first in these steps down to 2**-16 of the whole, then in finer ones, until an
# end moves by less than a tenth of a quantization step (2**(1 / 2500) is 1 + 0.07 / 255).
_COARSE_STEP, _COARSE_DEPTH, _FINEST_STEP = 1 / 4, -16.0, 1 / 2500


class HistogramObserver(UniformQuantizationObserverBase):
    """Finds the per-tensor affine qparams with the least expected squared error, from a histogram of all it has seen.

    A replacement for ``torch.ao.quantization.HistogramObserver``: arguments and buffers have the same names, and it
    serves in a ``QConfig`` or a ``FakeQuantize``. It differs in these points. The result does not depend on how values
    are split into batches, nor on the batches' order. Both ends of the range are searched together; torch.ao stops
    at the first step that does not help. NaN and infinity raise, rather than spoil the range or be skipped.

    Bin ``i`` counts the values in ``[(i - bins / 2) * width, (i + 1 - bins / 2) * width)``; ``width`` is the smallest
    power of two for which the bins hold all values. Of tensors with more than 262,144 values, about 131,000 are
    counted, each for its neighbours too; minimum and maximum are exact. A search takes 1 to 6 ms.

    Args:
        bins: number of bins, a power of two of at least 16. Half of them lie on each side of zero.
        dtype: ``torch.quint8``, ``torch.uint8``, ``torch.qint8`` or ``torch.int8``; only a marker, as in ``QConfig``,
            no tensor of this dtype is made.
        qscheme: ``torch.per_tensor_affine``.
        reduce_range: leave one bit unused, for CPUs without exact int8 dot products.
        quant_min: smallest integer, with ``quant_max``; from ``dtype`` if None.
        quant_max: largest integer.
        eps: lower bound of the scale.
        is_dynamic: must be False; taken because ``FakeQuantize`` passes it.

    Attributes:
        histogram: int64 counts, shape ``(bins,)``.
        min_val: float32, shape ``()``, the smallest value seen, +inf before the first.
        max_val: float32, shape ``()``, the largest value seen, -inf before the first.

    Raises:
        ConfigurationError: for arguments that it cannot serve.

    >>> observer = HistogramObserver()
    >>> _ = observer(torch.linspace(0, 2.55, 256))
    >>> scale, zero_point = observer.calculate_qparams()
    >>> round(scale.item(), 4), zero_point.item()
    (0.01, 0)
    """

    histogram: Tensor
    min_val: Tensor
    max_val: Tensor

    def __init__(
        self,
        bins: int = 8192,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float = torch.finfo(torch.float32).eps,
        is_dynamic: bool = False,
    ) -> None:
        if dtype not in (torch.quint8, torch.uint8, torch.qint8, torch.int8):
            raise ConfigurationError("HistogramObserver is for 8-bit integers", expected="uint8 or int8", got=dtype)
        if qscheme != torch.per_tensor_affine or is_dynamic:
            raise ConfigurationError(
                "HistogramObserver finds static per-tensor affine qparams",
                expected="qscheme=torch.per_tensor_affine, is_dynamic=False",
                got=f"qscheme={qscheme}, is_dynamic={is_dynamic}",
                hint="use an observer of torch.ao.quantization for other schemes",
            )
        if bins < 16 or bins & (bins - 1):
            raise ConfigurationError("unusable number of bins", expected="a power of two, 16 or more", got=bins)
        if not eps > 0:
            raise ConfigurationError("a scale must be positive", expected="eps > 0", got=eps)
        quant_min, quant_max = _integer_range(dtype, quant_min, quant_max, reduce_range)
        # The base class warns about reduce_range, once per observer; the range already says it.
        super().__init__(dtype=dtype, qscheme=qscheme, quant_min=quant_min, quant_max=quant_max, eps=eps)
        self.reduce_range = reduce_range
        self.bins = bins
        # int64: a float32 bin would stop counting at 2**24, which one batch of images can reach.
        self.register_buffer("histogram", torch.zeros(bins, dtype=torch.int64))
        self.register_buffer("min_val", torch.tensor(math.inf, dtype=torch.float32))
        self.register_buffer("max_val", torch.tensor(-math.inf, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Counts the values of ``x`` and returns ``x`` itself.

        Args:
            x: any shape, layout and real dtype; values are counted as float32. An empty tensor is ignored.

        Raises:
            CalibrationError: ``x`` has NaN or infinity; the observer is as it was before.
        """
        if x.numel() == 0:
            return x
        values = _flat(x.detach()).to(torch.float32)
        low, high = (end.item() for end in torch.aminmax(values))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise _not_finite(x)
        exponent = self._widen(low, high)
        # In place, so that buffers stay ordinary tensors when calibration runs in inference mode.
        half = self.bins // 2
        step = _sampling_step(tuple(x.shape))
        if step > 1:
            sample = values[::step]
            inner = [end.item() for end in torch.aminmax(sample)]
            if (
                low < _BEYOND * inner[0] or high > _BEYOND * inner[1]
            ):  # outliers are few and decide much: count them all
                outside = values[(values < inner[0]) | (values > inner[1])]
                self._count(outside, half, exponent, 1)
            values = sample
        self._count(values, half, exponent, step, positive=low == 0.0)
        return x

    def _count(self, values: Tensor, half: int, exponent: int, weight: int, positive: bool = False) -> None:
        scaled = values.mul(half / 2.0**exponent)
        if positive:
            counts = _count_beside_zeros(scaled, half)
            self.histogram[half:].add_(counts[:half], alpha=weight)
            self.histogram[half] += counts[half:].sum() * weight
        else:
            # Scaling by a power of two and flooring are exact; adding first would round some values up.
            counts = torch.bincount(scaled.floor_().add_(half).to(torch.int32), minlength=self.bins)
            self.histogram.add_(counts, alpha=weight)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # torch's base wants **kwargs
        """The qparams with the least expected squared error, clipping included.

        Zero is always represented exactly. If no value seen is as large as ``eps``, the scale is 1.

        Returns:
            scale, float32 of shape ``(1,)``, and zero point, int32 of shape ``(1,)``.

        Raises:
            NotCalibratedError: nothing was observed.
        """
        low, high = self.min_val.item(), self.max_val.item()
        if low > high:
            raise NotCalibratedError(
                "qparams asked of an observer that has seen no data",
                hint="run the prepared model on calibration data that reaches this value",
            )
        eps = self.eps.item()
        if max(-low, high) < eps:
            scale, zero_point = 1.0, 0
        else:
            search = _RangeSearch(*self.occupied(low, high), self.quant_min, self.quant_max, eps)
            scale, zero_point = search.run(min(low, 0.0), max(high, 0.0))
        return torch.tensor([scale], dtype=torch.float32), torch.tensor([zero_point], dtype=torch.int32)

    def extra_repr(self) -> str:
        seen = "nothing seen" if self.min_val > self.max_val else f"seen [{self.min_val:.6g}, {self.max_val:.6g}]"
        return f"{seen}, quant_min={self.quant_min}, quant_max={self.quant_max}"

    def _widen(self, low: float, high: float) -> int:
        """Makes the bins hold ``[low, high]`` too, by sums of whole bins; returns the exponent of the new range."""
        old_low, old_high = self.min_val.item(), self.max_val.item()
        if old_low <= low and high <= old_high:
            return _exponent(old_low, old_high)
        low, high = min(low, old_low), max(high, old_high)
        exponent = _exponent(low, high)
        doublings = exponent - _exponent(old_low, old_high) if old_low <= old_high else 0
        if doublings:
            half = self.bins // 2
            # An arithmetic shift is a floor, for bins left of zero too.
            index = (torch.arange(-half, half) >> min(doublings, 62)) + half
            self.histogram.copy_(torch.zeros_like(self.histogram).index_add_(0, index, self.histogram))
        self.min_val.fill_(low)
        self.max_val.fill_(high)
        return exponent

    def occupied(self, low: float, high: float) -> tuple[Tensor, Tensor]:
        """Edges and counts of the bins from ``low`` to ``high``, float64, shapes ``(n + 1,)`` and ``(n,)``."""
        width = 2.0 ** (_exponent(low, high) + 1) / self.bins
        first, last = math.floor(low / width), math.floor(high / width)
        edges = torch.arange(first, last + 2, dtype=torch.float64) * width
        # Values clipped by a model (relu6, tanh) pile up at the very end: it is a point, not a bin wide. The bin keeps
        # some width, since a density is computed from it.
        edges[0] = low
        edges[-1] = max(high, edges[-2].item() + width / 1024)
        half = self.bins // 2
        return edges, self.histogram[first + half : last + half + 1].to(torch.float64)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "histogram")
        if saved is not None and saved.dtype is not torch.int64:
            errors: list[str] = rest[-1]
            errors.append(f"{prefix}histogram holds {saved.dtype}, not int64 counts: another observer class saved it")
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _RangeSearch:
    """The scale and zero point with the least expected squared error, for values spread evenly within each bin.

    Candidate ranges are ``[low * 2**a, high * 2**b]`` with ``a, b <= 0``: a coarse look at all of them, with rounding
    errors taken for evenly distributed, then a pattern search with exact errors around the best.
    """

    def __init__(self, edges: Tensor, counts: Tensor, quant_min: int, quant_max: int, eps: float) -> None:
        self.edges, self.counts = edges, counts
        self.quant_min, self.quant_max, self.eps = quant_min, quant_max, eps
        density = counts / edges.diff()
        zero = density.new_zeros(1)
        drop = torch.cat([zero, density]) - torch.cat([density, zero])
        # Where the density goes on as it was, an edge adds nothing: of a few thousand values most bins are empty.
        (here,) = drop.nonzero(as_tuple=True)
        self.turns, self.density_drop = edges[here], drop[here]

    def run(self, low: float, high: float) -> tuple[float, int]:
        """Scale and zero point for values in ``[low, high]``, which must contain zero."""
        shrink_low, shrink_high = self._coarse(low, high)
        step = _COARSE_STEP / 2
        # A dozen rounds as a rule; more where many values are zero, hence cost nothing, and the coarse look erred.
        for _ in range(40):
            a, b = _around(shrink_low, step, low), _around(shrink_high, step, high)
            errors = self._errors(*self._qparams(low * torch.exp2(a)[:, None], high * torch.exp2(b)))
            i, j = divmod(int(errors.argmin()), len(b))
            if i == j == 0:
                step /= 2
            if step < _FINEST_STEP:
                break
            shrink_low, shrink_high = a[i].item(), b[j].item()
        # The whole range too: exact where the values are few and evenly spaced, such as those of a mask.
        shrink = torch.tensor([[shrink_low, shrink_high], [0.0, 0.0]], dtype=torch.float64)
        scale, zero_point = self._qparams(low * torch.exp2(shrink[:, 0]), high * torch.exp2(shrink[:, 1]))
        best = self._errors(scale, zero_point).argmin()
        return scale[best].item(), int(zero_point[best])

    def _coarse(self, low: float, high: float) -> tuple[float, float]:
        """Exponents ``a`` and ``b`` of the best range, when each value not clipped costs ``scale**2 / 12``."""
        shrink = torch.arange(0.0, _COARSE_DEPTH, -_COARSE_STEP, dtype=torch.float64)
        a, b = (shrink if end else shrink[:1] for end in (low, high))
        lows, highs = low * torch.exp2(a)[:, None], high * torch.exp2(b)
        centers = (self.edges[1:] + self.edges[:-1]) / 2
        clipped_low = _clipping_error(-centers.flip(0), self.counts.flip(0), -lows)
        clipped_high = _clipping_error(centers, self.counts, highs)
        scale = (highs - lows) / (self.quant_max - self.quant_min)
        errors = clipped_low + clipped_high + scale.square() * (self.counts.sum() / 12)
        i, j = divmod(int(errors.argmin()), len(b))
        return a[i].item(), b[j].item()

    def _qparams(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and zero points of the ranges from ``low`` to ``high``, which broadcast; as float64."""
        scale = ((high - low) / (self.quant_max - self.quant_min)).clamp_(min=self.eps)
        return scale, (self.quant_min - low / scale).round_().clamp_(self.quant_min, self.quant_max)

    def _errors(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Sum of the squared errors, shape of ``scale`` flattened.

        ``n / 12 + r**3 / 3``, with ``r`` the distance to the nearest integer ``n``, is an antiderivative of ``r**2``,
        also past the last integer, where ``r`` goes on growing; so an exact integral takes one evaluation per bin edge.
        """
        scale, zero_point = scale.reshape(-1, 1), zero_point.reshape(-1, 1)
        # Slices for which torch starts no threads: on a busy machine, waiting for them takes longer than the sums.
        rows = max(1, _SERIAL // max(1, len(self.turns)))
        sums = [self._error_sums(*part) for part in zip(scale.split(rows), zero_point.split(rows), strict=True)]
        return torch.cat(sums) * scale.flatten() ** 3

    def _error_sums(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        position = self.turns / scale
        # Unlike round(), which starts threads from 2048 elements on.
        nearest = (position + _ROUND).sub_(_ROUND).clamp_(self.quant_min - zero_point, self.quant_max - zero_point)
        rest = position.sub_(nearest)
        integral = (rest.square() / 3).mul_(rest).add_(nearest, alpha=1 / 12)
        return integral.mul_(self.density_drop).sum(-1)


def _around(shrink: float, step: float, end: float) -> Tensor:
    """Exponents to try next, for the range's end ``end``: zero has none but itself."""
    if end == 0.0:
        return torch.zeros(1, dtype=torch.float64)
    # The middle first: index 0 is where the search is, and ties stay there.
    return torch.tensor([shrink, shrink + step, shrink - step], dtype=torch.float64).clamp_(max=0.0)


def _clipping_error(values: Tensor, counts: Tensor, limits: Tensor) -> Tensor:
    """Sum of the squared distances from each of ``limits`` to the ``values`` (ascending) above it."""
    moments = torch.stack([counts, counts * values, counts * values.square()])
    # Summed from the far end: what is above a limit is few and large, and must not drown in the sum of all.
    above = F.pad(moments.flip(1).cumsum(1).flip(1), (0, 1))
    zeroth, first, second = above[:, torch.searchsorted(values, limits.contiguous())]
    return second - 2 * limits * first + limits.square() * zeroth


def _integer_range(
    dtype: torch.dtype, quant_min: int | None, quant_max: int | None, reduce_range: bool
) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    if quant_min is None and quant_max is None:
        quant_min, quant_max = info.min, info.max
    if quant_min is not None and quant_max is not None and reduce_range:
        # Floor division, as torch.ao does: 0..255 becomes 0..127, -128..127 becomes -64..63.
        quant_min, quant_max = quant_min // 2, quant_max // 2
    if quant_min is None or quant_max is None or not info.min <= quant_min <= 0 < quant_max <= info.max:
        raise ConfigurationError(
            f"unusable integer range for {dtype}",
            expected=f"{info.min} <= quant_min <= 0 < quant_max <= {info.max}, or neither given",
            got=f"quant_min={quant_min}, quant_max={quant_max}",
        )
    return quant_min, quant_max


def _exponent(low: float, high: float) -> int:
    """The least ``e`` with all values of ``[low, high]`` strictly between ``-2**e`` and ``2**e``."""
    largest = max(-low, high)
    return max(math.frexp(largest)[1], _MIN_EXPONENT) if largest else _MIN_EXPONENT


def _flat(x: Tensor) -> Tensor:
    """All values in memory order: a view, also of channels_last, unless ``x`` has gaps or overlaps."""
    return x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).reshape(-1)


def _count_beside_zeros(scaled: Tensor, half: int) -> Tensor:
    """Counts of the positive values by their integer part, in bins 0 to ``half - 1``; zeros are in the bins after.

    Half of what relu returns is zero, and counting into one bin again and again stalls the CPU: bincount would take 2.5
    times as long. So zeros take turns among many bins. ``scaled`` is overwritten.
    """
    torch.lerp(_turns(half)[: scaled.numel()], scaled, scaled.sign(), out=scaled)
    return torch.bincount(scaled.to(torch.int32), minlength=half + _TURNS)


@functools.cache
def _turns(first: int) -> Tensor:
    return first + torch.arange(_COUNT_ALL, dtype=torch.float32) % _TURNS


@functools.lru_cache(maxsize=1024)
def _sampling_step(shape: tuple[int, ...]) -> int:
    """Every how manyth value to count: 1 for tensors up to ``_COUNT_ALL``, else an odd number without a factor in
    common with any size, so that all channels and positions take their turn."""
    size = math.prod(shape)
    step = 1 if size <= _COUNT_ALL else math.ceil(size / _SAMPLES) | 1
    while step > 1 and any(math.gcd(step, n) > 1 for n in shape):
        step += 2
    return step


def _not_finite(x: Tensor) -> CalibrationError:
    nans, infinities = int(x.isnan().sum()), int(x.isinf().sum())
    return CalibrationError(
        "a value seen in calibration is not finite",
        expected="finite values that fit float32",
        got=f"{x.dtype} of shape {tuple(x.shape)} with {nans} NaN and {infinities} infinite of {x.numel()} values",
        hint="check the calibration data, or leave the op in float with a qconfig of None",
    )


def observed(observer: nn.Module) -> bool:
    """Whether an observer of dbrq or torch.ao, or a fake quantize that holds one, can give qparams now.

    Observers that need no data (placeholders, fixed qparams) can.

    >>> observer = HistogramObserver()
    >>> observed(observer)
    False
    >>> _ = observer(torch.ones(3))
    >>> observed(observer)
    True
    """
    observer = getattr(observer, "activation_post_process", observer)
    min_val: Tensor | None = getattr(observer, "min_val", None)
    if min_val is None:
        return hasattr(observer, "calculate_qparams")
    # Unused, torch.ao's per-channel observers hold empty tensors, all others +inf.
    return min_val.numel() > 0 and not bool(torch.isposinf(min_val).any())


def default_qconfig_mapping(reduce_range: bool | None = None) -> QConfigMapping:
    """The default recipe: u8 activations from histograms, s8 symmetric per-channel weights, matmuls in float.

    Products of two activations (attention) stay float. A softmax over hundreds of keys has probabilities below half an
    8-bit step beside some near one, and loses them. And the gain would be small: for 128 to 512 tokens, an int8 matmul,
    with the quantizing of its inputs, takes 0.6 to 2.5 times as long as float32. To quantize them nonetheless, set
    their object types again, in all spellings that the model uses.

    Args:
        reduce_range: whether activations leave one bit unused. None: only if this CPU has no VNNI; there, pairs of
            products saturate at 16 bits unless activations have 7. Pass True for models that will run on such CPUs.

    >>> mapping = default_qconfig_mapping(reduce_range=True)
    >>> mapping.global_qconfig.activation().quant_max
    127
    >>> mapping.object_type_qconfigs[torch.matmul] is None
    True
    """
    if reduce_range is None:
        reduce_range = not has_exact_int8_dot()
    mapping = QConfigMapping().set_global(
        QConfig(
            activation=HistogramObserver.with_args(reduce_range=reduce_range),
            weight=default_per_channel_weight_observer,
        )
    )
    row = FUNCTIONS[torch.matmul].row
    spellings: tuple[Callable | str, ...] = (*row.functions, *row.methods, *row.operators)
    for matmul in spellings:
        mapping.set_object_type(matmul, None)
    return mapping


def dynamic_qconfig_mapping(
    *, weight_only: bool = False, embeddings: bool | None = None, reduce_range: bool | None = None
) -> QConfigMapping:
    """The recipe for language models: linear layers with s8 per-channel weights, on activations that are quantized to
    u8 as they come, each token by its own range.

    Nothing is calibrated: a run shows which path the model takes, and its numbers are forgotten. Few channels of the
    residual stream of large language models are a hundred times as large as the others, in some tokens, so that a range
    for all tokens leaves most of them few levels. All linear layers are int8, the last one (``lm_head``) too, and LSTM,
    GRU and RNN, step by step. Convolutions, which have no dynamic kernel, and products of activations stay float.

    Args:
        weight_only: activations stay float. That saves the same memory, and is slower: each weight is made float again
            where it is used.
        embeddings: whether tables of embeddings are int8, too, each row with a scale and a zero point. None: where they
            are the weight of an int8 linear layer (tied to ``lm_head``), so that it is there once; False keeps a float
            copy beside it.
        reduce_range: as for ``default_qconfig_mapping``.

    >>> model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
    >>> mapping = dynamic_qconfig_mapping(embeddings=True)
    >>> from dbrq import prepare, report
    >>> prepared = prepare(model, torch.zeros(1, 4, dtype=torch.long), mapping)
    >>> [row.kernel for row in report(prepared).rows]
    ['int8 rows', 'onednn.qlinear_pointwise (dynamic, by row)']
    """
    if reduce_range is None:
        reduce_range = not has_exact_int8_dot()
    by_row = PlaceholderObserver.with_args(
        dtype=torch.quint8, quant_min=0, quant_max=127 if reduce_range else 255, is_dynamic=True,
        qscheme=torch.per_channel_affine,
    )  # fmt: skip
    activation = PlaceholderObserver.with_args(dtype=torch.float32) if weight_only else by_row
    mapping = QConfigMapping().set_global(QConfig(activation, default_per_channel_weight_observer))
    # Dynamic, embeddings are int8 in no other way than by reading rows of a weight that is.
    tied = QConfig(by_row, default_per_channel_weight_observer)
    of_tables = tied if embeddings is None else float_qparams_weight_only_qconfig if embeddings else None
    for table in (nn.Embedding, nn.EmbeddingBag, F.embedding, F.embedding_bag):
        mapping.set_object_type(table, of_tables)
    return mapping
