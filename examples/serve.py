"""Run a lowered model where dbrq is not installed: only torch is needed.

    python examples/quickstart.py --save model.pt     # writes model.pt, and model.pt.inputs with an example
    python examples/serve.py model.pt model.pt.inputs

The file is TorchScript with stock torch kernels inside; ``torch.jit.load`` packs the int8 weights as it loads them. It
carries an example with what that should give: ``self_test`` tells whether this CPU's kernels give it.
"""

import argparse
import time

import torch

parser = argparse.ArgumentParser(description="Load a lowered model with torch alone, and time it.")
parser.add_argument("model", help="what dbrq.save wrote")
parser.add_argument("inputs", help="torch.save of a dict of keyword arguments, or of one tensor")
options = parser.parse_args()

model = torch.jit.load(options.model)
if not model.self_test():
    raise SystemExit(f"{options.model}: wrong numbers on this CPU ({model.self_test_sqnr():.1f} dB); not serving")
inputs = torch.load(options.inputs, weights_only=True)
with torch.no_grad():
    for _ in range(10):
        start = time.perf_counter()
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
print(f"{1e3 * (time.perf_counter() - start):.2f} ms")
for name, value in output.items() if isinstance(output, dict) else [("output", output)]:
    print(name, tuple(value.shape), value.flatten()[:4])
