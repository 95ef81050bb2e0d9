"""Ops that move elements keep values and qparams."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.cases import by_name
from tests.helpers.judging import assert_matches
from tests.helpers.models import Between, Call

MOVES = {
    "view": lambda x: x.view(x.size(0), -1),
    "view twice": lambda x: x.view(2, 8, -1).view(2, 8, 10, 10),
    "reshape": lambda x: x.reshape(x.shape[0], -1),
    "torch.reshape": lambda x: torch.reshape(x, (2, -1)),
    "flatten": lambda x: x.flatten(1),
    "torch.flatten": lambda x: torch.flatten(x, start_dim=1),
    "Flatten": nn.Flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 4)).flatten(1, 2),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute tuple": lambda x: x.permute((0, 1, 3, 2)),
    "torch.permute": lambda x: torch.permute(x, dims=(0, 3, 1, 2)),
    "transpose": lambda x: x.transpose(1, 2),
    "swapaxes": lambda x: torch.swapaxes(x, 2, 3),
    "movedim": lambda x: torch.movedim(x, 1, -1),
    "mT": lambda x: x.mT,
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze all": lambda x: x[:1].squeeze(),
    "expand": lambda x: x[:, :1].expand(2, 8, 10, 10),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "tile": lambda x: torch.tile(x, (1, 1, 2, 1)),
    "narrow": lambda x: x.narrow(1, 2, 4),
    "select": lambda x: x.select(2, 3),
    "slice": lambda x: x[:, ::2, 1:-1],
    "index": lambda x: x[:, [0, 2, 4]],
    "mask": lambda x: x[torch.tensor([True, False])],
    "ellipsis": lambda x: x[..., None][..., 0],
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "torch.chunk": lambda x: torch.chunk(x, chunks=4, dim=1)[2],
    "split": lambda x: x.split(3, dim=1)[1],
    "torch.split": lambda x: torch.split(x, [2, 6], dim=1)[1],
    "tensor_split": lambda x: torch.tensor_split(x, 3, dim=1)[0],
    "unbind": lambda x: x.unbind(2)[1],
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "flip": lambda x: x.flip(2),
    "roll": lambda x: torch.roll(x, 1, 2),
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 1])),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "PixelShuffle": nn.PixelShuffle(2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "ChannelShuffle": nn.ChannelShuffle(2),
    "pad": lambda x: F.pad(x, (1, 1)),
    "pad value": lambda x: F.pad(x, (1, 1), value=0.5),
    "pad reflect": lambda x: F.pad(x, (1, 2, 1, 0), mode="reflect"),
    "ZeroPad2d": nn.ZeroPad2d(1),
    "ReflectionPad2d": nn.ReflectionPad2d(1),
    "Dropout": nn.Dropout(0.5),
    "F.dropout": lambda x: F.dropout(x, 0.5, training=False),
    "Dropout2d": nn.Dropout2d(0.5),
    "Identity": nn.Identity(),
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to a device": lambda x: x.to("cpu"),
    "double and back": lambda x: x.double().float(),
    "data": lambda x: x.data,
}


@by_name(MOVES, "op")
def test_moves_keep_values_and_qparams(op):
    """Against fake quantization: FX graph mode fails on views of what oneDNN gives as channels_last."""
    model = Between(copy.deepcopy(op))
    converted = assert_matches(model, model.example, fx=False)
    plain = {row.precision for row in dbrq.report(converted).rows if row.op.startswith(("conv", "linear"))}
    assert plain == {"int8"}


@by_name(MOVES, "op")
def test_moves_of_an_output_and_of_an_input(op):
    op = op.eval() if isinstance(op, nn.Module) else op
    conv = nn.Conv2d(4, 8, 3, padding=1)
    assert_matches(Call(lambda m, x: op(m.conv(x)), conv=conv), torch.randn(2, 4, 10, 10), fx=False)
    assert_matches(Call(lambda m, x: m.conv(op(x) * 1.0) if op(x).dim() == 4 and op(x).shape[1] == 8 else op(x),
                        conv=nn.Conv2d(8, 4, 1)), torch.randn(2, 8, 10, 10), fx=False)  # fmt: skip
