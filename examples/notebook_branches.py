# %% [markdown]
# # A model that thinks until it is sure
#
# A network looks at a digit, and as long as it is not sure it goes through the same block once more: how often depends
# on the values, so there is no one graph. Calibration follows each path that the data takes; each of them runs in
# int8, and `lower` makes kernels of the parts between the decisions.
#
# Needs `pip install 'dbrq[examples]'`. As a script: `python examples/notebook_branches.py [--out FOLDER]`; it prints
# the paths and the agreement with float, and saves two pictures.

# %%
import functools
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import dbrq
import digits
import pictures
from quickstart import milliseconds

out = pictures.options().out
MOST = 3


class Block(nn.Module):
    """A residual block without batch norms, since its statistics would be others on each trip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


class Thinker(nn.Module):
    """One digit, ``(1, 1, 32, 32)`` -> its logits, ``(1, 10)``, and how often it thought, 0 to 3 times."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip
        self.think = Block(width)
        self.decide = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10))

    def forward(self, x: Tensor, sure: float = 0.95) -> tuple[Tensor, int]:
        h = self.look(x)
        for trips in range(MOST + 1):
            logits = self.decide(h)
            if trips == MOST or logits.softmax(1).max() > sure:  # this decides what runs
                break
            h = self.think(h)
        return logits, trips


# %% [markdown]
# ## Training
# On whole batches, on what is decided after each trip.

# %%
train_x, test_x, train_y, test_y = digits.load_data()
train_x, test_x = (F.interpolate(x, size=(32, 32), mode="bilinear") for x in (train_x, test_x))
torch.manual_seed(0)
model = Thinker()
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=2 * 43)
for _ in range(2):
    for batch in torch.randperm(len(train_x)).split(32):
        h, loss = model.look(train_x[batch]), torch.zeros(())
        for _ in range(MOST + 1):
            loss = loss + F.cross_entropy(model.decide(h), train_y[batch])
            h = model.think(h)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
model.eval()


def share(hits: Tensor) -> float:
    return hits.double().mean().item()


@torch.no_grad()
def answers(one: nn.Module) -> tuple[Tensor, Tensor]:
    """What it says of each test digit, and how often it thought."""
    found = [one(x[None]) for x in test_x]
    return torch.stack([logits.argmax() for logits, _ in found]), torch.tensor([trips for _, trips in found])


said, trips = answers(model)
print(f"float: {share(said == test_y):.1%} right; digits that took 0, 1, ... trips: {trips.bincount().tolist()}")

# %% [markdown]
# ## Quantize
# The record joins what each calibration run shows. Of paths that calibration never took, dbrq says so, once, and goes
# on in float.

# %%
prepared = dbrq.prepare(model, train_x[:1])
for x in train_x[:200]:
    prepared(x[None])
quantized = dbrq.convert(prepared)
paths = [row for row in dbrq.report(quantized).paths if row.module == ""]
print(tabulate([(row.number, row.seen) for row in paths], headers=["path", "times seen"]))

int8_said, int8_trips = answers(quantized)
same, as_often = share(int8_said == said), share(int8_trips == trips)
print(f"int8: {share(int8_said == test_y):.1%} right; the same digit in {same:.1%}, as many trips in {as_often:.1%}")

# %%
easy = [x[None] for x in train_x[:200] if model(x[None])[1] == 0]
hurried = dbrq.quantize(model, easy[:20])  # a calibration that thinks too little
hardest = test_x[trips.argmax()][None]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    hurried(hardest)
print(f"\ncalibrated on easy digits only, and then given a hard one:\n  {caught[0].message}")

# %% [markdown]
# ## Lower
# `look` and `think` are straight lines: each becomes kernels, `think` once for each trip, since ranges differ. The
# decision stays Python. The result is a `Thinker` still. With layers as small as these the converted model is slower
# than float, since Python finds the kernel of each op; the parts leave that out.

# %%
lowered = dbrq.lower(quantized, hardest, backend="onednn")
lowered_said, lowered_trips = answers(lowered)
assert isinstance(lowered, Thinker)
print(f"lowered in parts: the same digit as converted in {share(lowered_said == int8_said):.1%}")

# %%
models = {"float": model, "int8, converted": quantized, "int8, lowered in parts": lowered}
seen = {number: test_x[(trips == number) & (int8_trips == number)][:1] for number in range(MOST + 1)}
calls = [functools.partial(one, digit) for digit in seen.values() for one in models.values()]
times = torch.tensor(milliseconds(tuple(calls), 0.95, slices=3)).view(MOST + 1, len(models))
print(tabulate([(number, *row.tolist()) for number, row in enumerate(times)],
               headers=["trips", *(f"{name} (ms)" for name in models)], floatfmt=".2f"))  # fmt: skip

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
for column, (name, colour) in zip(times.T, pictures.colours(models).items(), strict=True):
    left.plot(column.numpy(), marker="o", color=colour, label=name)
left.set(xlabel="trips through the block", ylabel="latency of one digit (ms, median)", ylim=(0, None))
left.set(xticks=range(MOST + 1), title="What thinking costs")
left.legend()
for shift, (name, found) in ((-0.2, ("float", trips)), (0.2, ("int8", int8_trips))):
    places, counts = np.arange(MOST + 1) + shift, found.bincount(minlength=MOST + 1).numpy()
    bars = right.bar(places, counts, 0.4, color=pictures.FLOAT if name == "float" else pictures.INT8, label=name)
    right.bar_label(bars, fontsize=8)
right.set(xticks=range(MOST + 1), xlabel="trips through the block", ylabel="test digits", title="How often it thinks")
right.grid(axis="x", visible=False)
right.legend()
pictures.save(figure, out / "thinking.png")

# %%
order = int8_trips.argsort(stable=True)
figure = plt.figure(figsize=(11, 3.4))
for part, chosen, title in zip(figure.subfigures(2), (order[:10], order[-10:]), ("at once", "last"), strict=True):
    part.suptitle(f"Decided {title}: what int8 says (and what is true, if that is something else)", fontsize=10)
    for ax, number in zip(part.subplots(1, 10), chosen, strict=True):
        ax.imshow(test_x[number, 0].numpy(), cmap="gray_r")
        ax.set_title(f"{int8_said[number]}" + (f" ({test_y[number]})" if int8_said[number] != test_y[number] else ""))
        ax.axis("off")
pictures.save(figure, out / "digits.png")
