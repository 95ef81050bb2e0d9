"""ultralytics: a YOLO detector whose ``predict`` runs in int8.

    pip install 'dbrq[examples]' opencv-python-headless
    pip install --no-deps ultralytics torchvision==0.28.0   # the torchvision of your torch; ultralytics is AGPL-3.0
    python examples/with_ultralytics.py                     # or: --weights yolo26n.pt

Without ``--weights`` the detector has random weights and settled batch norms: its boxes mean nothing, but they cost
what real ones cost, and int8 must find the same. Three things to know: fuse the model before it is quantized, since
``predict`` would fuse it afterwards; ``predictor.preprocess`` gives the batches that ``predict`` runs, to calibrate
on; a YOLO keeps the model of its first ``predict``, so the quantized one gets a YOLO of its own.
Printed: the share in int8, how close each op comes to float's (signal to noise, in dB), and the time of a call.
"""

import argparse
import functools
import statistics
from collections.abc import Sequence

import torch
from sklearn.datasets import load_sample_images
from tabulate import tabulate
from torch import Tensor
from ultralytics import YOLO

import dbrq
from quickstart import milliseconds

SETTINGS = {"nms": False, "device": "cpu", "verbose": False}  # the head that needs no non-maximum suppression


def load(weights: str | None) -> YOLO:
    if weights is not None:
        return YOLO(weights)
    yolo = YOLO("yolo26n.yaml")  # a description, which is part of ultralytics
    yolo.model.train()
    for _ in range(10):
        yolo.model(torch.rand(2, 3, 160, 160))  # batch norms settle
    yolo.model.eval()
    return yolo


def quantize(yolo: YOLO, batches: Sequence[Tensor], name: str) -> YOLO:
    quantized = YOLO(name)
    quantized.model = dbrq.quantize(yolo.model, batches)
    return quantized


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Quantize a YOLO detector and predict with it.")
    parser.add_argument("--weights", help="a file of yolo26, if you have one")
    parser.add_argument("--size", type=int, default=640, help="pixels of the longer side, as the detector sees it")
    options = parser.parse_args(arguments)
    # Boxes of random weights have no confidence: all are kept.
    settings = {**SETTINGS, "imgsz": options.size, "conf": 0.25 if options.weights else 0.0}
    torch.manual_seed(0)

    photographs = [image[..., ::-1].copy() for image in load_sample_images().images]  # BGR, as OpenCV reads files
    yolo = load(options.weights)
    yolo.model.end2end = True
    yolo.fuse()
    yolo.predict(photographs, **settings)
    batches = [yolo.predictor.preprocess([photograph]) for photograph in photographs]
    quantized = quantize(yolo, batches, options.weights or "yolo26n.yaml")

    found = quantized.predict(photographs, **settings)
    before, after = milliseconds(
        tuple(functools.partial(one.predict, **settings) for one in (yolo, quantized)), photographs[:1]
    )
    compared = dbrq.compare(yolo.model, quantized.model, batches[0])
    measured = {
        "coverage": dbrq.report(quantized.model).coverage,
        "boxes": float(len(found[0].boxes)),
        "worst op by itself (dB)": min(row.local for row in compared.rows if row.local is not None),
        "median op as it runs (dB)": statistics.median(row.sqnr for row in compared.rows),
        "predict, float (ms)": before,
        "predict, int8 (ms)": after,
    }
    print(tabulate(measured.items(), floatfmt=".3f"))
    return measured


if __name__ == "__main__":
    main()
