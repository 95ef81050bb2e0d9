"""ultralytics: a YOLO detector whose ``predict`` runs in int8.

    pip install 'dbrq[examples]' opencv-python-headless
    pip install --no-deps ultralytics torchvision==0.28.0   # the torchvision of your torch; ultralytics is AGPL-3.0
    python examples/with_ultralytics.py                     # or: --weights yolo26n.pt

Without ``--weights`` the detector has random weights and settled batch norms: its boxes mean nothing, but they cost
what real ones cost, and int8 must find the same. Three things to know: fuse the model before it is quantized, since
``predict`` would fuse it afterwards; ``predictor.preprocess`` gives the batches that ``predict`` runs, to calibrate
on; a YOLO keeps the model of its first ``predict``, so the quantized one gets a YOLO of its own.
Printed: how close the features that the head reads are to float's (signal to noise, in dB), and the time of a call.
"""

import argparse
import functools
import os
import tempfile
from collections.abc import Sequence

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())  # where ultralytics writes settings on import
import torch
from sklearn.datasets import load_sample_images
from tabulate import tabulate
from torch import Tensor
from ultralytics import YOLO

import dbrq
from dbrq.inspection.comparing import sqnr
from quickstart import milliseconds

# The head without non-maximum suppression, and every box: those of random weights have no confidence.
SETTINGS = {"nms": False, "conf": 0.0, "device": "cpu", "verbose": False}


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
    settings = {**SETTINGS, "imgsz": options.size}
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
    noise = map(sqnr, read_by_head(yolo, batches[0]), read_by_head(quantized, batches[0]))
    measured = {
        "coverage": dbrq.report(quantized.model).coverage,
        "boxes": float(len(found[0].boxes)),
        "least SQNR of features (dB)": min(noise),
        "predict, float (ms)": before,
        "predict, int8 (ms)": after,
    }
    print(tabulate(measured.items(), floatfmt=".3f"))
    return measured


def read_by_head(yolo: YOLO, batch: Tensor) -> list[Tensor]:
    """The feature maps of three sizes from which boxes are computed."""
    return yolo.model(batch)[1]["one2one"]["feats"]


if __name__ == "__main__":
    main()
