"""Presets: which methods make int8 more accurate than rounding to the nearest, each by its name and source."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, fields
from typing import Any

from torch.ao.quantization import QConfigMapping, get_default_qat_qconfig_mapping

from ..calibration.observers import dynamic_qconfig_mapping
from ..errors import ConfigurationError, nearest
from ..record.record import Record, SeenOp


@dataclass(frozen=True)
class Preset:
    """What conversion does beyond rounding to the nearest, with what calibration showed.

    All methods work on the ops that were recorded, so on any code that dbrq runs: ``F.linear`` as well as
    ``nn.Linear``. They need a sample of the calibration data, which the prepared model keeps (64 MiB at most, drawn
    from all batches with equal chances).

    Args:
        smoothing: multiply the channels of what a linear layer reads by factors, and its weight by their inverses, so
            that few channels with wide ranges do not take the steps from all others (Xiao et al., SmoothQuant, 2023).
            Strength by group of layers that read one value, "none" among the candidates, judged by the error of the
            layers' outputs on calibration data that the factors were not made from.
        bias_correction: "fast" takes the mean error of each layer's output, on float inputs, from its bias (Nagel et
            al., Data-Free Quantization, 2019); "full" does so layer after layer, on inputs as the layers before make
            them in int8, correction included. None for neither.
        ranges: how the range of a value is found: "histogram" (least squared error of the value), "output" (least
            squared error of what the layers make of it), or a percentage such as 99.99: the narrowest range with that
            share of the values on each side.
        rounding: of weights. "nearest"; "gptq" moves the error of each column to those that follow (Frantar et al.,
            GPTQ, 2023); "adaround" learns which way to round (Nagel et al., Up or Down?, 2020), in minutes.
        equalization: give the channels between two layers equal ranges, where only what multiplies (relu, leaky relu,
            max pooling) lies between (Nagel et al., Data-Free Quantization, 2019).
        keep: patterns of names of ops (as ``report(model).rows`` has them under ``path``) that stay float, and
            "residuals": what is added to the result of a layer stays float.

    Raises:
        ConfigurationError: a method has no such setting.

    >>> Preset(smoothing=True, bias_correction="fast").methods
    ('smoothing', 'bias_correction')
    """

    smoothing: bool = False
    bias_correction: str | None = None
    ranges: str | float = "histogram"
    rounding: str = "nearest"
    equalization: bool = False
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keep: Any = self.keep
        object.__setattr__(self, "keep", (keep,) if isinstance(keep, str) else tuple(keep))
        allowed = {
            "smoothing": (True, False), "equalization": (True, False), "bias_correction": (None, "fast", "full"),
            "rounding": ("nearest", "gptq", "adaround"),
        }  # fmt: skip
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise _no_setting(name, f"one of {', '.join(map(repr, values))}", getattr(self, name))
        if isinstance(self.ranges, str):
            if self.ranges not in ("histogram", "output"):
                raise _no_setting("ranges", "'histogram', 'output' or a percentage", self.ranges)
        elif not 50 < self.ranges <= 100:
            raise _no_setting("ranges", "a percentage above 50, such as 99.99", self.ranges)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the settings that are not those of ``Preset()``."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)

    def floats(self, record: Record) -> dict[str, str]:
        """Path of each op that ``keep`` keeps in float -> why.

        Raises:
            ConfigurationError: a pattern matches no op.
        """
        found: dict[str, str] = {}
        hooked = record.hooked()
        for pattern in self.keep:
            matches = [op for op in hooked if _is_kept(pattern, op)]
            if not matches and pattern != "residuals":
                raise ConfigurationError(
                    f"Preset(keep=...) has {pattern!r}, which matches no op of the model", got=pattern,
                    expected="a pattern of names as report(model).rows has them under path, or 'residuals'",
                    hint=nearest(pattern, (op.path for op in hooked)),
                )  # fmt: skip
            found.update((op.path, f"the preset keeps it in float: {pattern!r}") for op in matches)
        return found

    @property
    def needs_data(self) -> bool:
        """Whether a method looks at a sample of the calibration data."""
        return bool(set(self.methods) - {"keep"})


def _is_kept(pattern: str, op: SeenOp) -> bool:
    if pattern == "residuals":
        return op.row.name == "add" and len(op.activations) > 1
    return fnmatch.fnmatchcase(op.path, pattern) or fnmatch.fnmatchcase(f".{op.path}", pattern)


def _no_setting(name: str, expected: str, got: Any) -> ConfigurationError:
    return ConfigurationError(f"Preset has no such {name}", expected=expected, got=repr(got))


#: Names of presets -> what they stand for.
PRESETS: dict[str, Preset] = {
    "fast": Preset(),
    "default": Preset(),
    "accurate": Preset(smoothing=True, bias_correction="full", ranges="output", rounding="gptq", equalization=True),
    "transformer": Preset(smoothing=True, bias_correction="fast"),
    "dynamic": Preset(),
    "qat": Preset(),
}
_MAPPINGS = {"dynamic": dynamic_qconfig_mapping, "qat": lambda: get_default_qat_qconfig_mapping("x86")}


def named(preset: Any) -> Preset:
    """The preset of a name, or the preset itself.

    Raises:
        ConfigurationError: there is none of this name.
    """
    if isinstance(preset, Preset):
        return preset
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigurationError(
            "there is no such preset", expected=f"a dbrq.Preset or one of {', '.join(PRESETS)}", got=repr(preset),
            hint=nearest(preset, PRESETS) if isinstance(preset, str) else None,
        )  # fmt: skip
    return PRESETS[preset]


def of_conversion(preset: Any) -> Preset | None:
    """The preset that ``convert`` is given.

    Raises:
        ConfigurationError: there is none of this name, or it stands for a qconfig mapping, which ``prepare`` takes.
    """
    if isinstance(preset, str) and preset in _MAPPINGS:
        raise ConfigurationError(
            f"the preset {preset!r} stands for a qconfig mapping, by which models are prepared", got=preset,
            expected=f"one of {', '.join(sorted(PRESETS.keys() - _MAPPINGS.keys()))}, or a dbrq.Preset",
            hint=f"prepare(model, example, preset={preset!r})",
        )  # fmt: skip
    return None if preset is None else named(preset)


def resolved(preset: Any, qconfig_mapping: Any) -> tuple[Preset, Any]:
    """The preset that a name or None means, and the qconfig mapping that goes with it.

    Raises:
        ConfigurationError: there is none of this name, or it comes with a mapping of its own beside that of the caller.
    """
    if preset is None:
        return (PRESETS["default"] if qconfig_mapping is None else Preset()), qconfig_mapping
    found = named(preset)
    if isinstance(preset, str) and preset in _MAPPINGS:
        if qconfig_mapping is not None:
            raise ConfigurationError(
                f"the preset {preset!r} stands for a qconfig mapping, and there is another",
                expected="preset or qconfig_mapping", got=type(qconfig_mapping).__name__, hint="leave one of them out",
            )  # fmt: skip
        mapping: QConfigMapping = _MAPPINGS[preset]()
        return found, mapping
    return found, qconfig_mapping
