"""The text of Python's own documentation, as characters."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

#: Rarer ones are the last character: versions of Python differ in those.
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
COUNT = len(CHARACTERS) + 1


@functools.cache
def text() -> tuple[Tensor, Tensor]:
    """The characters to train on and those held out: whole topics, about a tenth."""
    from pydoc_data.topics import topics

    order = sorted(topics)
    held = "\n".join(topics[name] for name in order[5::10])
    rest = "\n".join(topics[name] for i, name in enumerate(order) if i % 10 != 5)
    return _ids(rest), _ids(held)


def passages(ids: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """``(len(starts), length)`` characters, and the one after each of them."""
    found = ids[starts[:, None] + torch.arange(length + 1)]
    return found[:, :-1], found[:, 1:]


def _ids(characters: str) -> Tensor:
    known = {character: i for i, character in enumerate(CHARACTERS)}
    return torch.tensor([known.get(character, len(CHARACTERS)) for character in characters])
