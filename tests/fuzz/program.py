"""Programs: small models as source text, made statement by statement while they run.

A program is made from a seed alone. Each statement that the grammar proposes is run at once on real tensors; what torch
rejects is dropped, so rules need not work out shapes. What remains is text: it prints, runs anywhere, and loses
statements one by one when a failure is made smaller.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from textwrap import indent
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import blocks

#: Elements that a value may have at most: programs are many, so they are small.
LARGEST = 30_000
HEADER = """import torch
import torch.nn.functional as F
from torch import nn

from tests.fuzz.blocks import *
"""


class Inapplicable(Exception):
    """A rule found nothing that it could be applied to."""


@dataclass(frozen=True)
class Statement:
    """What one application of a rule wrote.

    Attributes:
        rule: its name.
        init: lines of ``__init__``.
        lines: lines of ``forward``.
        made: the variables that it gave a name to.
    """

    rule: str
    init: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    made: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """A model with the calls it is tried on.

    Attributes:
        seed: what its weights and inputs are drawn from.
        parameters: names of forward's parameters.
        statements: what forward does, in order.
        result: the expression that it returns.
        calls: for each call, an expression for each parameter; the first is the example.
        config: "static", "smoothed" (static, with random factors for what linear layers read), "dynamic", or "float":
            not quantized, only lowered.
        random: whether it draws random numbers.
        stateful: whether it writes to its buffers.
        varying: whether layers have other settings in calls of other sizes.
    """

    seed: int
    parameters: tuple[str, ...]
    statements: tuple[Statement, ...]
    result: str
    calls: tuple[tuple[str, ...], ...]
    config: str = "static"
    random: bool = False
    stateful: bool = False
    varying: bool = False

    @property
    def rules(self) -> list[str]:
        return [statement.rule for statement in self.statements]

    def source(self) -> str:
        """The model as text."""
        init = [line for s in self.statements for line in s.init]
        body = [line for s in self.statements for line in s.lines]
        lines = ["class Program(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [indent(line, " " * 8) for line in init]
        lines += ["", f"    def forward(self, {', '.join(self.parameters)}):"]
        lines += [indent(line, " " * 8) for line in body]
        return "\n".join([*lines, f"        return {self.result}"]) + "\n"

    def script(self) -> str:
        """A script that shows what each backend makes of it."""
        calls = ",\n    ".join(f"lambda: ({', '.join(call)},)" for call in self.calls)
        head = f"# config: {self.config}; random: {self.random}; stateful: {self.stateful}; varying: {self.varying}\n"
        return f"{head}{HEADER}\n\n{self.source()}\n\nSEED = {self.seed}\nCALLS = [\n    {calls},\n]\n"

    def build(self) -> nn.Module:
        """The model, with weights and running statistics drawn from the seed."""
        space = namespace()
        exec(compile(self.source(), f"<program {self.seed}>", "exec"), space)
        torch.manual_seed(self.seed)
        model: nn.Module = space["Program"]()
        _vary(model, self.seed)
        return model.eval()

    def inputs(self, call: int, variant: int = 0) -> tuple[Any, ...]:
        """The arguments of a call; other values for each variant."""
        generator_state = torch.get_rng_state()
        torch.manual_seed(self.seed * 31 + call * 7 + variant + 1)
        try:
            return tuple(eval(text, namespace()) for text in self.calls[call])
        finally:
            torch.set_rng_state(generator_state)


def namespace() -> dict[str, Any]:
    """The names that a program's text uses."""
    names = {name: value for name, value in vars(blocks).items() if isinstance(value, type)}
    return {**names, "torch": torch, "F": F, "nn": nn, "Tensor": Tensor}


def _vary(model: nn.Module, seed: int) -> None:
    """Give norms statistics and weights as training would: fresh ones do nothing, which hides what goes wrong."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(tensor: Tensor, low: float, high: float) -> None:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
                uniform(module.running_mean, -0.5, 0.5)
                uniform(module.running_var, 0.5, 2.0)  # type: ignore[arg-type]
            norm = isinstance(module, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm))
            if norm and module.weight is not None:
                uniform(module.weight, 0.5, 1.5)
            if norm and module.bias is not None:
                uniform(module.bias, -0.5, 0.5)


# Making them


class Draft:
    """A program in the making, with the values that its variables have on the example."""

    def __init__(self, seed: int, rng: random.Random) -> None:
        self.seed, self.rng = seed, rng
        self.model = nn.Module()
        self.space: dict[str, Any] = {**namespace(), "self": self.model}
        self.names: list[str] = []
        self.parameters: list[str] = []
        self.statements: list[Statement] = []
        self.random = self.stateful = self.varying = False
        self._init: list[str] = []
        self.lines: list[str] = []
        self._made: list[str] = []
        self._count = 0

    # What rules ask

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def choose(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def value(self, name: str) -> Any:
        return self.space[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.space[name].shape)

    def pick(self, dim: int | None = None, where: Callable[[Tensor], bool] | None = None, dtype: str = "float") -> str:
        """A variable that holds a tensor; more often a late one."""
        found = [
            name for name in self.names
            if isinstance(v := self.space[name], Tensor)
            and (v.dtype is torch.float32 if dtype == "float" else v.dtype is getattr(torch, dtype))
            and (dim is None or v.dim() == dim)
            and (where is None or where(v))
        ]  # fmt: skip
        if not found:
            raise Inapplicable
        return found[-1] if self.chance(0.75) else self.rng.choice(found)

    def like(self, name: str) -> str:
        """A variable of the same shape, perhaps the same variable."""
        shape = self.value(name).shape
        return self.pick(where=lambda v: v.shape == shape)

    # What rules write

    def module(self, text: str) -> str:
        """A submodule, as the expression that reads it."""
        return self.attribute(f"nn.{text}" if text.partition("(")[0] not in self.space else text, "m")

    def parameter(self, text: str) -> str:
        return self.attribute(f"nn.Parameter({text})", "w")

    def buffer(self, text: str) -> str:
        name = self._name("b")
        line = f'self.register_buffer("{name}", {text})'
        exec(line, self.space)
        self._init.append(line)
        return f"self.{name}"

    def attribute(self, text: str, letter: str = "a") -> str:
        name = self._name(letter)
        line = f"self.{name} = {text}"
        exec(line, self.space)
        if isinstance(made := getattr(self.model, name), nn.Module):
            made.eval()
        self._init.append(line)
        return f"self.{name}"

    def let(self, text: str) -> str:
        """A new variable with the value of an expression."""
        name = self._name("v")
        self.do(f"{name} = {text}")
        self.made(name)
        return name

    def lets(self, text: str, count: int) -> list[str]:
        """Several variables from an expression that gives several values."""
        names = [self._name("v") for _ in range(count)]
        self.do(f"{', '.join(names)}{',' if count == 1 else ''} = {text}")
        for name in names:
            self.made(name)
        return names

    def do(self, *lines: str) -> None:
        exec("\n".join(lines), self.space)
        self.lines += lines

    def made(self, name: str) -> None:
        self._made.append(name)
        self.names.append(name)

    def _name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    # What the generator does with rules

    def apply(self, rule: Callable[[Draft], Any]) -> bool:
        """Apply a rule; False if torch rejects what it wrote."""
        known = len(self.names)
        self._init, self.lines, self._made = [], [], []
        flags = self.random, self.stateful, self.varying
        try:
            with torch.no_grad():
                rule(self)
        except Inapplicable:
            pass
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError):
            pass
        else:
            if not self._usable():
                raise Unusable
            self.statements.append(Statement(rule.__name__, tuple(self._init), tuple(self.lines), tuple(self._made)))
            return True
        del self.names[known:]
        self.random, self.stateful, self.varying = flags
        return False

    def _usable(self) -> bool:
        for name in self.names:
            value = self.space[name]
            if isinstance(value, Tensor):
                if not 0 < value.numel() <= LARGEST:
                    return False
                if value.is_floating_point() and not (value.isfinite().all() and value.abs().max() < 1e4):
                    return False
        return True


class Unusable(Exception):
    """A statement left values that are too large, too many or not finite: the draft is given up."""


# Making them smaller


def reads(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


def renamed(text: str, old: str, new: str) -> str:
    return re.sub(rf"\b{old}\b", new, text)


def smaller(program: Program) -> Iterable[Program]:
    """Programs with less in them, the smallest first; many of them do not run."""
    names = list(program.parameters)
    for statement in program.statements:
        names += statement.made
    for number, statement in enumerate(program.statements):  # end here
        for name in statement.made:
            if program.result != name:
                yield (replace(program, statements=program.statements[: number + 1], result=name))
    for name in re.findall(r"\bv\d+\b", program.result):
        if program.result != name:
            yield (replace(program, result=name))
    for number, statement in enumerate(program.statements):  # without this one, others reading what came before
        rest = program.statements[:number] + program.statements[number + 1 :]
        if not any(reads(line, made) for made in statement.made for s in rest for line in s.lines) and not any(
            reads(program.result, made) for made in statement.made
        ):
            yield (replace(program, statements=rest))
            continue
        known = names[: len(program.parameters) + sum(len(s.made) for s in program.statements[:number])]
        for stand_in in reversed(known):
            yield (_without(replace(program, statements=rest), statement.made, stand_in))
    for number, statement in enumerate(program.statements):
        for index in range(len(statement.lines)):
            lines = statement.lines[:index] + statement.lines[index + 1 :]
            if lines:
                changed = replace(statement, lines=lines)
                yield replace(
                    program, statements=(*program.statements[:number], changed, *program.statements[number + 1 :])
                )
    for count in range(1, len(program.calls)):
        yield replace(program, calls=program.calls[:count])
        yield replace(program, calls=(program.calls[0], program.calls[count]))


def _without(program: Program, made: tuple[str, ...], stand_in: str) -> Program:
    statements, result = list(program.statements), program.result
    for name in made:
        statements = [replace(s, lines=tuple(renamed(line, name, stand_in) for line in s.lines)) for s in statements]
        result = renamed(result, name, stand_in)
    return replace(program, statements=tuple(statements), result=result)


@dataclass
class Rules:
    """Rules with their weights, filled by the decorator."""

    rules: list[Callable[[Draft], Any]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def __call__(self, weight: float) -> Callable[[Callable[[Draft], Any]], Callable[[Draft], Any]]:
        def add(rule: Callable[[Draft], Any]) -> Callable[[Draft], Any]:
            self.rules.append(rule)
            self.weights.append(weight)
            return rule

        return add

    def draw(self, rng: random.Random, without: Collection[str] = ()) -> Callable[[Draft], Any]:
        weights = [0.0 if r.__name__ in without else w for r, w in zip(self.rules, self.weights, strict=True)]
        return rng.choices(self.rules, weights)[0]
