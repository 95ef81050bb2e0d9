# %% [markdown]
# # Where accuracy goes, and how to get it back
#
# A network whose accuracy falls when it is quantized: two channels of one layer are a thousand times larger than the
# others. (Trained transformers and mobile networks have such channels, if not as large.) How to see which layer it is,
# why, and what to do.
#
# Needs `pip install 'dbrq[examples]'`. As a script: `python examples/notebook_accuracy.py [--out FOLDER]`; it prints
# accuracies and the worst layers, and saves three pictures and two reports as HTML.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import dbrq
import digits
import pictures

out = pictures.options().out

# %% [markdown]
# ## The patient
# A residual network trained on handwritten digits. Two channels of a batch norm are multiplied by 1000, and the
# weights that read them divided by 1000: a relu is all that lies between, so the float model computes what it did.

# %%
model = digits.load_model()
with torch.no_grad():
    model.block1.bn1.weight[:2] *= 1000
    model.block1.bn1.bias[:2] *= 1000
    model.block1.conv2.weight[:, :2] /= 1000


@torch.no_grad()
def accuracy(one: nn.Module) -> float:
    _, images, _, labels = digits.load_data()
    return (one(images).argmax(1) == labels).double().mean().item()


data = digits.calibration_batches()
prepared = dbrq.calibrate(dbrq.prepare(model, data[0]), data)
quantized = dbrq.convert(prepared)
measured = {"float": accuracy(model), "all in int8": accuracy(quantized)}
print(f"accuracy {measured['float']:.1%} in float, {measured['all in int8']:.1%} in int8")
print(f"{dbrq.report(quantized).coverage:.0%} of multiply-accumulates in int8: coverage says nothing about accuracy")

# %% [markdown]
# ## Which layer
# `compare` runs both models on one batch. `sqnr` is the error that has come together up to an op; `local` is that of
# the op alone, on inputs as they are in float. So the least `local` names the layer to look at.

# %%
x = digits.example_inputs()
compared = dbrq.compare(model, quantized, x)
worst = min((row for row in compared.rows if row.local is not None), key=lambda row: row.local)
print(compared)
where = next(row for row in dbrq.report(quantized).rows if row.path == worst.path)
print(f"\nthe one to look at: {worst.path}, {worst.local:.1f} dB by itself; it is {where.kernel}")

# %%
order = [row.path for row in dbrq.report(quantized).rows]
rows = sorted(compared.rows, key=lambda row: order.index(row.path))
figure, ax = plt.subplots(figsize=(9, 4))
places = np.arange(len(rows))
ax.bar(places - 0.2, [row.local for row in rows], 0.4, color=pictures.INT8, label="local: the op alone")
ax.bar(places + 0.2, [row.sqnr for row in rows], 0.4, color=pictures.FLOAT, label="as it runs: all errors so far")
ax.set_xticks(places, [row.path for row in rows], rotation=30, ha="right")
ax.set(ylabel="signal to noise (dB): higher is better", xlabel="op, in the order of the run")
figure.legend(loc="outside upper right", ncols=2)
ax.grid(axis="x", visible=False)
pictures.save(figure, out / "errors.png")

# %% [markdown]
# ## Why
# The report of the *prepared* model still has the histograms. What the sick layer reads spreads over a range in which
# nearly all values lie in the first few of the 256 levels.

# %%
LAYER = "block1.conv2"  # what the report says that the op above is fused into
ranges = {found.op: found for found in dbrq.report(prepared).facts.ranges}
healthy = ranges["block2.conv2"]
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True)
for ax, found, title in ((left, healthy, "a healthy layer"), (right, ranges[LAYER], "the layer to look at")):
    low, high = found.seen
    edges = np.linspace(low, high, len(found.counts) + 1)
    ax.stairs(found.counts, edges, fill=True, color=pictures.INT8)
    step = (found.high - found.low) / (found.levels - 1)
    ax.set(yscale="log", xlabel="value", title=f"What {found.op} reads: {title}\none level is {step:.3f} wide")
left.set_ylabel("values of calibration")
pictures.save(figure, out / "ranges.png")

# %% [markdown]
# ## What to do
# Leave that layer in float, and nothing else. `exclude=` takes paths, patterns and classes.

# %%
repaired = dbrq.quantize(model, data, exclude=[LAYER])
measured[f"{LAYER} in float"] = accuracy(repaired)
coverage = dbrq.report(repaired).coverage
print(f"with {LAYER} in float: accuracy {accuracy(repaired):.1%}, {coverage:.0%} of multiply-accumulates in int8")

# %%
figure, ax = plt.subplots(figsize=(7, 2.4))
pictures.bars(ax, {name: 100 * share for name, share in measured.items()}, "accuracy on 450 digits (%)")
pictures.save(figure, out / "accuracy.png")

# %% [markdown]
# The same as pages, with a plot of each op and range: that of the prepared model has the histograms.

# %%
dbrq.report(quantized).save(out / "before.html", compare=compared)
dbrq.report(repaired).save(out / "after.html", compare=dbrq.compare(model, repaired, x))
print(f"reports: {out / 'before.html'}, {out / 'after.html'}")
