"""Calibration data as people have it: what of it reaches the model, and what is told about the rest."""

from __future__ import annotations

import functools
import warnings
from collections import UserDict
from typing import TypedDict

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from typing_extensions import Unpack

import dbrq

X, Y = torch.randn(12, 8), torch.arange(12)


class Base(nn.Module):
    """Remembers what each call of its forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table, self.calls = nn.Linear(8, 8), nn.Embedding(100, 8), []

    def seen(self, *args, **kwargs):
        self.calls.append((args, kwargs))


class One(Base):
    def forward(self, x):
        self.seen(x)
        return self.fc(x)


class Two(Base):
    def forward(self, a, b):
        self.seen(a, b)
        return self.fc(a) + b


class Masked(Base):
    def forward(self, x, mask=None):
        self.seen(x, mask)
        return self.fc(x if mask is None else x * mask)


class Any(Base):
    def forward(self, *args, **kwargs):
        self.seen(*args, **kwargs)
        return self.fc(args[0] if args else kwargs["x"])


class More(TypedDict, total=False):
    scale: float


class Tokens(Base):
    def forward(self, input_ids, attention_mask=None, labels=None):
        self.seen(input_ids, attention_mask, labels)
        return self.fc(self.table(input_ids))


def calls(model: nn.Module, data, **options) -> list:
    """What forward was given in calibration, beside the watched run of the example."""
    given: list = []

    class Keep(list):
        def __deepcopy__(self, memo):
            return self

        def append(self, call):
            given.append(call)

    model.calls = Keep()
    quantized = dbrq.quantize(model.eval(), data, progress=False, **options)
    assert type(quantized) is type(model)
    return given[1:]


def quietly(function, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args, **options)


def loader(*columns, **options) -> DataLoader:
    return DataLoader(TensorDataset(*columns), batch_size=4, **options)


# Loaders


def test_a_loader_of_inputs_and_labels_drops_the_labels_with_one_note():
    with pytest.warns(UserWarning, match=r"forward does not take item\[1\]") as notes:
        given = calls(One(), loader(X, Y))
    assert len(notes) == 1
    assert len(given) == 3 and all(len(args) == 1 and args[0].shape == (4, 8) for args, _ in given)


def test_what_forward_needs_is_not_dropped():
    assert all(args[1].equal(args[0]) for args, _ in quietly(calls, Two(), loader(X, X)))
    with pytest.warns(UserWarning, match=r"item\[2\]"):
        given = calls(Two(), loader(X, X, Y))
    assert all(len(args) == 2 for args, _ in given)


@pytest.mark.parametrize("model", [Masked, Any])
def test_a_loader_whose_second_column_might_be_either_is_ambiguous(model):
    with pytest.raises(dbrq.ConfigurationError, match="unpack=lambda item: item"):
        dbrq.quantize(model(), loader(X, Y))


@pytest.mark.parametrize("model", [Masked, Any])
def test_unpack_settles_it(model):
    assert all(
        args[0].shape == (4, 8) for args, _ in quietly(calls, model(), loader(X, Y), unpack=lambda item: item[0])
    )
    ones = torch.ones(12, 8)
    assert all(args[1].equal(torch.ones(4, 8)) for args, _ in quietly(calls, model(), loader(X, ones), unpack=tuple))


def test_the_example_settles_it():
    masked = quietly(dbrq.calibrate, dbrq.prepare(Masked(), (X, torch.ones(12, 8))), loader(X, torch.ones(12, 8)))
    assert dbrq.report(dbrq.convert(masked)).coverage == 1.0
    prepared = dbrq.prepare(Masked(), X)
    with pytest.warns(UserWarning, match=r"item\[1\]"):
        dbrq.calibrate(prepared, loader(X, Y))  # labels taken for a mask would not broadcast


def test_a_loader_of_inputs_alone():
    assert len(quietly(calls, One(), loader(X))) == 3
    assert len(quietly(calls, Masked(), loader(X))) == 3
    assert len(quietly(calls, One(), DataLoader(X, batch_size=4))) == 3


def test_a_loader_of_dicts_and_labels():
    rows = [({"input_ids": torch.arange(5), "attention_mask": torch.ones(5)}, i) for i in range(4)]
    with pytest.warns(UserWarning, match=r"item\[1\]"):
        given = calls(Tokens(), DataLoader(rows, batch_size=2))
    assert [args[0].shape for args, _ in given] == [(2, 5), (2, 5)]
    assert all(args[1] is not None and args[2] is None for args, _ in given)


def test_workers_and_iterable_datasets():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(x, 0) for x in X])

    with pytest.warns(UserWarning):
        assert len(calls(One(), DataLoader(Stream(), batch_size=4))) == 3


def test_pre_hooks_may_take_the_whole_item():
    model = One()
    model.register_forward_pre_hook(lambda module, args: args[0])
    given = quietly(calls, model, [((X[:4], Y[:4]),)], unpack=lambda item: ((item[0][0],),))
    assert given[0][0][0].equal(X[:4])


# Mappings


def test_what_a_tokenizer_returns():
    batch = UserDict(input_ids=torch.arange(10).view(2, 5), attention_mask=torch.ones(2, 5), token_type_ids=Y)
    with pytest.warns(UserWarning, match="'token_type_ids'"):
        given = calls(Tokens(), [batch, batch])
    assert [args[0].shape for args, _ in given] == [(2, 5), (2, 5)]


def test_a_batch_encoding_of_transformers():
    transformers = pytest.importorskip("transformers")
    given = quietly(calls, Tokens(), [transformers.BatchEncoding({"input_ids": torch.arange(6)[None]})])
    assert given[0][0][0].shape == (1, 6)


class Rows:
    """In the manner of ``datasets.Dataset``: items are single examples, whatever they are made of."""

    features = column_names = ("text", "input_ids", "attention_mask", "label")

    def __init__(self, made=list):
        self.made = made

    def __len__(self):
        return 3

    def __getitem__(self, i):
        if i >= 3:
            raise IndexError(i)
        return {"text": "some words", "input_ids": self.made([5, 6, 7 + i]), "attention_mask": self.made([1, 1, 1]),
                "label": i}  # fmt: skip


@pytest.mark.parametrize("made", [list, np.array, torch.tensor])
def test_rows_of_a_dataset_become_batches_of_one(made):
    with pytest.warns(UserWarning, match="'text', 'label'") as notes:
        given = calls(Tokens(), Rows(made))
    assert len(notes) == 1
    assert [args[0].tolist() for args, _ in given] == [[[5, 6, 7 + i]] for i in range(3)]
    assert given[0][0][0].dtype is torch.int64 and given[0][0][1].shape == (1, 3)


def test_images_of_a_dataset_get_a_batch_dimension():
    class Images:
        features = column_names = ("x",)

        def __iter__(self):
            return iter([{"x": np.ones((3, 8)).tolist()}])

    ((x,), _) = calls(One(), Images())[0]
    assert x.shape == (1, 3, 8) and x.dtype is torch.float32


@pytest.mark.parametrize("made", [list, np.array])
def test_plain_dicts_of_lists_and_arrays(made):
    with pytest.warns(UserWarning, match="'idx'"):
        given = calls(Tokens(), [{"input_ids": made([1, 2, 3]), "idx": 4}])
    assert given[0][0][0].tolist() == [[1, 2, 3]]
    given = quietly(calls, Tokens(), [{"input_ids": made([[1, 2, 3], [4, 5, 6]])}])
    assert given[0][0][0].tolist() == [[1, 2, 3], [4, 5, 6]], "a batch already"


def test_rows_of_several_lengths_are_told():
    with pytest.raises(dbrq.ConfigurationError, match="padding=True"):
        dbrq.quantize(Tokens(), [{"input_ids": [[1, 2], [3]]}])


def test_a_dict_that_lacks_what_forward_takes():
    with pytest.raises(dbrq.ConfigurationError, match="unpack=") as raised:
        dbrq.quantize(One(), [{"image": X, "label": Y}])
    assert "'image', 'label'" in str(raised.value)


def test_keys_of_an_unpacked_typed_dict_are_taken():
    class Typed(Base):
        def forward(self, x, **kwargs: Unpack[More]):
            self.seen(x, **kwargs)
            return self.fc(x) * kwargs.get("scale", 1.0)

    with pytest.warns(UserWarning, match="'label'"):
        given = calls(Typed(), [{"x": X, "scale": 2.0, "label": Y}])
    assert given[0][1] == {"scale": 2.0}


def test_any_name_goes_where_forward_takes_any():
    assert set(quietly(calls, Any(), [{"x": X, "mode": "fast"}])[0][1]) == {"x", "mode"}


def test_lists_stay_lists_where_forward_takes_them():
    class Sized(Base):
        def forward(self, x, sizes: list[int] | None = None):
            assert sizes is None or isinstance(sizes, list)
            self.seen(x, sizes)
            return self.fc(x)

    assert quietly(calls, Sized(), [{"x": X, "sizes": [3, 4]}])[0][0][1] == [3, 4]

    class Listed(Base):
        def forward(self, tokens: list[int]):
            self.seen(tokens)
            return self.fc(self.table(torch.tensor(tokens)))

    assert quietly(calls, Listed(), [{"tokens": [1, 2, 3]}])[0][0][0] == [1, 2, 3]

    class Unnamed(Base):
        def forward(self, tokens):
            return self.fc(self.table(torch.tensor(tokens)))

    quietly(dbrq.calibrate, dbrq.prepare(Unnamed(), {"tokens": [1, 2]}), [{"tokens": [3, 4]}])


# Generators, tensors, nothing


def test_generators_are_read_once():
    assert len(quietly(calls, One(), (x[None] for x in X))) == 12
    assert len(quietly(calls, One(), (x[None] for x in X), max_batches=5)) == 5


@pytest.mark.parametrize("data", [[], iter(()), DataLoader([])])
def test_no_data_raises(data):
    with pytest.raises(dbrq.NotCalibratedError, match="no calibration data"):
        dbrq.quantize(One(), data)
    with pytest.raises(dbrq.NotCalibratedError):
        dbrq.convert(dbrq.calibrate(dbrq.prepare(One(), X), data))


def test_a_used_up_generator_raises_and_says_why():
    data = (x[None] for x in X)
    list(data)
    with pytest.raises(dbrq.NotCalibratedError, match="once only"):
        dbrq.calibrate(dbrq.prepare(One(), X), data)


def test_no_batches_asked_for():
    dbrq.calibrate(dbrq.prepare(One(), X), [X], max_batches=0)
    with pytest.raises(dbrq.NotCalibratedError):
        dbrq.quantize(One(), [X], max_batches=0)


@pytest.mark.parametrize("data", [X, X.numpy(), {"x": X}, UserDict(x=X)])
def test_a_batch_alone_is_one_batch_with_a_note(data):
    with pytest.warns(UserWarning, match="one batch"):
        given = calls(One(), data)
    assert len(given) == 1 and given[0][0][0].equal(X)


@pytest.mark.parametrize("data", [None, 3, "words", nn.Linear(1, 1), Dataset])
def test_what_is_no_data_raises(data):
    with pytest.raises(dbrq.ConfigurationError, match="iterable of batches"):
        dbrq.calibrate(dbrq.prepare(One(), X), data)


# What worked before


@pytest.mark.parametrize(
    ("model", "item"),
    [
        (One, X),
        (One, (X,)),
        (Masked, (X, torch.ones(8))),
        (Masked, [X, None]),
        (Masked, {"x": X, "mask": torch.ones(8)}),
        (Any, (X, Y)),
        (Two, [X, X]),
        (Tokens, {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "labels": torch.zeros(2)}),
    ],
)
def test_items_in_the_form_of_examples_go_on_unchanged(model, item):
    quietly(calls, model(), [item, item])
    prepared = dbrq.prepare(model(), item)
    quietly(dbrq.calibrate, prepared, [item], progress=False)


def test_a_model_of_one_dict():
    class Dicts(Base):
        def forward(self, batch):
            self.seen(batch)
            return self.fc(batch["x"])

    given = quietly(calls, Dicts(), [({"x": X, "batch": 3},)])
    assert set(given[0][0][0]) == {"x", "batch"}
    with pytest.warns(UserWarning, match=r"item\[1\]"):
        calls(Dicts(), [({"x": X}, Y)])
    with pytest.raises(dbrq.ConfigurationError, match="the mapping itself"):
        dbrq.quantize(Dicts(), [{"x": X}])


def test_progress_bars_know_how_many(capsys):
    pytest.importorskip("tqdm")
    dbrq.quantize(One(), [X] * 7, progress=True, max_batches=5)
    assert "/5" in capsys.readouterr().err


def test_a_class_of_tensor_is_a_tensor():
    assert isinstance(calls(One(), [nn.Parameter(X)])[0][0][0], Tensor)


def test_what_a_wrapper_takes_is_not_dropped():
    """``inspect.signature`` sees the wrapped function only, and the example ran with more."""

    def scaled(forward):
        @functools.wraps(forward)
        def wrapper(self, x, scale=None):
            return forward(self, x if scale is None else x * scale)

        return wrapper

    class Wrapped(One):
        @scaled
        def forward(self, x):
            return super().forward(x)

    item = {"x": X, "scale": torch.tensor(50.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared = dbrq.calibrate(dbrq.prepare(Wrapped(), item), [item])
        dbrq.convert(prepared)(**item)
