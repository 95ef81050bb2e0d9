"""Objects that hold tensors, taken apart and put together."""

import copy
import inspect
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import Tensor, nn

from dbrq.graph.objects import Apart, Boundary, Call, Together, is_object, names_of

Pair = namedtuple("Pair", "left right")


class Box:
    def __init__(self, **held):
        self.__dict__.update(held)


class Slotted:
    __slots__ = ("__dict__", "x")

    def __init__(self, x):
        self.x = x


class Items(list):
    pass


def roundtrip(value):
    apart = Apart()
    shape = apart.shape(value)
    hash(shape)
    return shape, apart.leaves, Together(apart.leaves).value(shape)


def same(a, b):
    if isinstance(a, Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if is_object(a):
        return same(vars(a), vars(b)) and (not hasattr(a, "x") or same(a.x, b.x))
    return a == b


T = torch.ones(2)
VALUES = {
    "an object": Box(a=T, n=3, flag=True, name="x", dtype=torch.float32),
    "objects in containers": [Box(a=T), {"k": (Box(b=torch.zeros(1)), None)}],
    "slots": Slotted(T),
    "a subclass of list": Items([T, 1]),
    "an ordered dict": OrderedDict(b=T, a=1.5),
    "a named tuple": Pair(T, Box(n=1)),
    "a slice": Box(s=slice(1, None, 2)),
    "a function": Box(f=torch.relu),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_taken_apart_is_put_together(name):
    _, leaves, made = roundtrip(VALUES[name])
    assert same(VALUES[name], made) and made is not VALUES[name]
    assert all(isinstance(leaf, Tensor) or type(leaf) is int for leaf in leaves)


def test_what_is_there_twice_is_there_twice():
    inner = Box(a=T)
    outer = Box(one=inner, two=inner, again=T)
    outer.myself = outer
    _, leaves, made = roundtrip(outer)
    assert made.one is made.two and made.myself is made and made.again is made.one.a and len(leaves) == 1


def test_outputs_of_transformers():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.CausalLMOutputWithPast(logits=T, past_key_values=Box(a=T))
    _, _, made = roundtrip(value)
    assert list(made) == list(value) and made.logits is made["logits"] is T and made.past_key_values.a is T
    made["loss"] = T  # the order that such a mapping keeps is whole
    assert list(made) == [*value, "loss"]


def shape_of(value):
    return Apart().shape(value)


def test_shapes_tell_what_code_may_decide_on():
    Box(a=T, n=1.0), Box(a=T, n=True)
    assert shape_of(Box(a=T, n=1)) == shape_of(Box(a=torch.zeros(3, 3), n=2))
    for other in (
        Box(a=T, n=1, more=0),
        Box(a=None, n=1),
        Box(n=1, a=T),
        Slotted(T),
        Box(a=T, n=1.0),
        Box(a=T, n=True),
    ):
        assert shape_of(Box(a=T, n=1)) != shape_of(other)
    assert shape_of(Box(flag=True)) != shape_of(Box(flag=False))
    first, second = torch.ones(1), torch.ones(1)
    assert shape_of([first, first]) != shape_of([first, second])
    assert shape_of(Box(f=copy.copy)) != shape_of(Box(f=copy.deepcopy))


def test_a_call_is_the_same_however_it_is_spelled():
    box = Box(a=T)
    calls = [Call.of(("x", "box"), (1, box), {}), Call.of(("x", "box"), (1,), {"box": box}),
             Call.of(("x", "box"), (), {"box": box, "x": 1})]  # fmt: skip
    assert len({call.shape for call in calls}) == 1
    assert calls[0].args == () and calls[0].kwargs == {"x": 1, "box": (T,)}


def test_what_has_no_name_to_callers_stays_where_it_is():
    def forward(x, /, memory=None):
        return x

    names = names_of(inspect.signature(forward))
    call = Call.of(names, (T,), {"memory": Box(a=T)})
    assert call.args == (T,) and list(call.kwargs) == ["memory"]


def test_dicts_of_tensors_keep_their_names_which_say_who_made_them():
    call = Call.of((), (), {"features": {"ids": T, "mask": torch.zeros(1)}})
    assert list(call.kwargs["features"]) == ["ids", "mask"] and type(call.kwargs["features"]) is dict


def test_arguments_without_anything_that_changes_stay_what_they_are():
    pair = (T, (torch.zeros(1), None))
    assert Call.of((), (pair,), {}).args[0] is pair


@pytest.mark.parametrize("strange", [{1, 2}, torch.Generator(), iter([])], ids=lambda v: type(v).__name__)
def test_what_cannot_be_followed_is_named(strange):
    assert type(strange).__name__ in Call.of((), (Box(a=T, s=strange),), {}).problem()
    assert not Call.of((), (Box(a=T, module=nn.ReLU(), function=torch.relu),), {}).problem()


def test_nothing_is_set_before_all_is_there():
    box = Box(a=T, n=1)
    call = Call.of((), (box,), {})
    new = ("new", Box, (), (("a", ("tensor",)), ("n", ("number",))))
    boundary = Boundary(call.shape, ((0, new),), ("tuple", tuple, (("tensor",), ("object", 0))))
    with pytest.raises(StopIteration):
        boundary.restore(call, [torch.zeros(2), 5])
    assert box.a is T and box.n == 1
    leaf, itself = boundary.restore(call, [torch.zeros(2), 5, T])
    assert leaf is T and itself is box and box.n == 5 and not box.a.any()
