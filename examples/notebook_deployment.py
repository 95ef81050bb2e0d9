# %% [markdown]
# # From a model to a file that serves
#
# Quantize, lower, save; then a process that knows nothing of dbrq loads the file, checks that the kernels of its CPU
# give what they should, and serves. A page says what is in the file.
#
# Needs `pip install 'dbrq[examples]'`. As a script: `python examples/notebook_deployment.py [--out FOLDER]`; it prints
# what each step found, and saves the files, a page and a picture.

# %%
import subprocess
import sys

import matplotlib.pyplot as plt
import torch

import dbrq
import digits
import pictures
from quickstart import megabytes, milliseconds

out = pictures.options().out

# %% [markdown]
# ## In the workshop
# The report of what was done, op by op, goes along with the model.

# %%
model, x = digits.load_model(), digits.example_inputs()
quantized = dbrq.quantize(model, digits.calibration_batches())
compared, profiled = dbrq.compare(model, quantized, x), dbrq.profile(quantized, x)
dbrq.report(quantized).save(out / "report.html", compare=compared, profile=profiled)
accuracy = digits.evaluate(model, quantized)["accuracy"]
print(f"page: {out / 'report.html'}\naccuracy: {accuracy[0]:.1%} in float, {accuracy[1]:.1%} in int8")

# %% [markdown]
# Lowered to torchscript the model is one file for Python and C++. It carries an example with what that should give.

# %%
lowered = dbrq.lower(quantized, x)
dbrq.save(lowered, out / "model.pt")
torch.save(x, out / "example.pt")
print(f"self_test: {lowered.self_test()}, {lowered.self_test_sqnr():.0f} dB from what the example should give")

# %% [markdown]
# ## Where it serves
# A process of its own, in which an import of dbrq would fail. That is the whole program:

# %%
SERVER = """
import sys
sys.modules["dbrq"] = None  # as where it is not installed
import torch

model = torch.jit.load(sys.argv[1])
if not model.self_test():
    sys.exit("wrong numbers on this CPU")
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])), sys.argv[3])
print("served with torch", torch.__version__, "alone")
"""
files = [str(out / name) for name in ("model.pt", "example.pt", "answer.pt")]
served = subprocess.run([sys.executable, "-c", SERVER, *files], capture_output=True, text=True, check=False, cwd=out)
print(served.stdout, served.stderr)
answer = torch.load(out / "answer.pt")
with torch.no_grad():
    same = torch.equal(answer, lowered(x))
print(f"what it answered is what the model gives here: {same}")

# %% [markdown]
# A file that was damaged on the way is refused before anything in it runs.

# %%
damaged = bytearray((out / "model.pt").read_bytes())
damaged[len(damaged) // 2] ^= 0xFF
(out / "damaged.pt").write_bytes(damaged)
try:
    dbrq.load(out / "damaged.pt")
except dbrq.LoadError as error:
    refusal = str(error)
    print(f"\n{refusal}")

# %% [markdown]
# ## What it saves

# %%
names = ("float", "int8, converted", "int8, torchscript", "int8, onednn")
models = (model, quantized, lowered, dbrq.lower(quantized, x, backend="onednn"))
latencies = dict(zip(names, milliseconds(models, x), strict=True))
sizes = {"float": megabytes(model), "int8": (out / "model.pt").stat().st_size / 1e6}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3), width_ratios=(1.6, 1))
pictures.bars(left, latencies, "latency of 32 digits (ms, median)", "%.2f")
pictures.bars(right, sizes, "MB: float weights; model.pt with its code", "%.2f")
pictures.save(figure, out / "savings.png")
