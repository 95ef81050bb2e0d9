"""What a run does with functions that no hook takes: they get plain float tensors, and it is noted who made what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch import dual_level, transform_level
from ..mappings import OpRow, function_name
from ..op_facts import is_pure, mutates, reads_values, target_of
from ..pytree import tree_leaves, tree_map
from ..record.record import Tag
from ..tensors import UNSURE, Int8Tensor, Int8Weight, Lazy, Provenance, are_plain, plain
from . import outside, views
from .outside import only_computes

_Getter = type(torch.Tensor.grad.__get__)  # type: ignore[union-attr]  # to torch's stubs a tensor


def _on_plain(func: Callable, args: tuple, kwargs: dict) -> Any:
    """``func`` on the float values of what it is given."""
    if not are_plain(args):
        args = tree_map(plain, args)
    if not kwargs:
        return func(*args)
    if not are_plain(kwargs.values()):
        kwargs = tree_map(plain, kwargs)
    return func(*args, **kwargs)


class FloatCalls:
    """The functions of one run that have no int8 hook.

    Attributes:
        provenance: who made the tensors of the run.
        unsure: the op that runs read a value of unknown range.
        strays: some op of this run did.
        transforms: those of torch.func, and the level of forward-mode AD, that were on when the run began.
    """

    def __init__(self) -> None:
        self.provenance = Provenance()
        self.unsure = self.strays = False
        self.transforms = transform_level(), dual_level()

    def _pass(self, func: Callable, row: OpRow, args: tuple, kwargs: dict) -> Any:
        """An op that moves elements: whoever made them made what it gives."""
        subject = args[0] if args else kwargs.get("input")
        if not isinstance(subject, Tensor) or mutates(func):
            return self._other(func, args, kwargs)
        if type(subject) is Tensor and not kwargs and are_plain(args):
            return self._passed_on(subject, func(*args))
        if isinstance(subject, Lazy):
            moved = views.move(func, row, subject, args, kwargs)
            if moved is not None:
                return moved
        tag = self.tag_of(subject)
        if isinstance(subject, Int8Tensor):
            output = outside.call(func, args, kwargs, self.provenance)
        else:
            output = _on_plain(func, args, kwargs)
        for leaf in () if tag is None else tree_leaves(output):
            if type(leaf) is Tensor and leaf is not subject:
                self.provenance.set_tag(leaf, tag)
        return output

    def _passed_on(self, subject: Tensor, output: Any) -> Any:
        """What an op that moves elements made of a float value: of the same origin."""
        tag = self.provenance.tag(subject)
        if tag is None or output is subject:
            return output
        if type(output) is Tensor:
            self.provenance.set_tag(output, tag)
            return output
        for leaf in output if type(output) is tuple else tree_leaves(output):
            if type(leaf) is Tensor and leaf is not subject:
                self.provenance.set_tag(leaf, tag)
        return output

    # Argument dequant hooks

    def _other(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if (
            only_computes(func)
            and are_plain(args)
            and (not kwargs or are_plain(kwargs.values()))
            and "out" not in kwargs
        ):
            return self._tagged_new(func, func(*args, **kwargs), args)
        if not reads_values(func):
            if func.__name__ in outside.HANDS_OUT and isinstance(args[0], Int8Tensor):
                return outside.call(func, args, kwargs, self.provenance)
            return func(*args, **kwargs)
        written = target_of(func, args, kwargs)
        if written is not None:
            output = self.run_float(func, args, kwargs, mutates(func))
            if type(written) is Tensor:
                self.provenance.set_tag_of_any(written, function_name(func))
            elif isinstance(written, Int8Tensor):
                written.tag_ = function_name(func)
            return output
        given = args
        if kwargs.get("out") is not None or not is_pure(func):
            output = outside.call(func, args, kwargs, self.provenance)
        else:
            if any(isinstance(a, (Lazy, list, tuple)) for a in args):
                args = tree_map(plain, args)
            if kwargs:
                kwargs = tree_map(plain, kwargs)
            output = func(*args, **kwargs)
        return self._tagged_new(func, output, given)

    def _tagged_new(self, func: Callable, output: Any, given: tuple) -> Any:
        if type(output) is Tensor:
            self._tag_new(func, output, given)
        elif isinstance(output, (tuple, list)):
            for leaf in output:
                if type(leaf) is Tensor:
                    self._tag_new(func, leaf, given)
        return output

    def _tag_new(self, func: Callable, output: Tensor, given: tuple) -> None:
        """Say who made a value; some functions return what they were given."""
        provenance = self.provenance
        if provenance.tag(output) is None:
            for a in given:
                if a is output:
                    return
            unsure = self.strays and any(isinstance(a, Tensor) and self.tag_of(a) == UNSURE for a in given)
            tag = UNSURE if unsure else function_name(func)
            if type(func) is _Getter:  # x.grad, x._base: tensors that were there before
                provenance.set_tag_of_any(output, tag)
            else:
                provenance.set_tag(output, tag)

    def run_float(self, func: Callable, args: tuple, kwargs: dict, inplace: bool) -> Any:
        """``func`` on plain tensors; an int8 value that it writes to takes the new value."""
        target = kwargs.get("out")
        if target is None and inplace and args:
            target = args[0]
        if not isinstance(target, Int8Tensor):
            if isinstance(target, Int8Weight):
                target.refuse_write(function_name(func))
            if target is not None:
                self.provenance.written(target)
            return _on_plain(func, args, kwargs)
        value = target.float_value().clone()
        args, kwargs = tree_map(lambda leaf: value if leaf is target else plain(leaf), (args, dict(kwargs)))
        func(*args, **kwargs)
        target.become(value)
        return target

    def follows(self, value: Tensor) -> bool:
        """Whether forward has torch follow ``value``, to differentiate what is made of it, or to compute it in vmap."""
        if value.requires_grad and torch.is_grad_enabled():
            return True
        return self.transforms != (transform_level(), dual_level())

    def tag_of(self, value: Tensor) -> Tag:
        """Who made ``value``."""
        if type(value) is Int8Tensor:
            if value.is_changed():
                return UNSURE
            return value.tag_ if value.deferred_ is None else value.deferred_.tag(value.stage_)
        return self.provenance.tag(value)
