"""Command that evaluates the model of a run: d9d-eval RUN_OR_FOLDER --data text.jsonl, or --tasks of lm-eval."""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from d9d_dist import UserError
from d9d_loop import data
from d9d_loop import result as results
from d9d_loop.cli_main import cli_main
from d9d_loop.result.adapted_base import ADAPTER_CONFIG, add_base_options
from d9d_loop.result.chat import choose_device

if TYPE_CHECKING:
    import torch

    from d9d_loop.result import LoadedResult


@final
@dataclass(frozen=True, slots=True)
class TextScore:
    """Quality of next-token predictions on texts.

    Attributes:
        loss: Mean negative log-likelihood per predicted token, in nats.
        accuracy: Fraction of the predicted tokens to which the model assigns the highest probability.
        bits_per_byte: Negative log-likelihood of all predicted tokens, in bits per byte of the original text behind the
            first token, which is not predicted.
        num_tokens: Number of predicted tokens.
    """

    loss: float
    accuracy: float
    bits_per_byte: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinite above the largest number."""
        return math.inf if self.loss > math.log(sys.float_info.max) else math.exp(self.loss)


def score_texts(result: "LoadedResult", texts: Iterable[str], *, length: int) -> TextScore:
    """Score the tokens of each text, in windows of at most `length` predicted tokens.

    Each window starts with the last token of the previous window, so each token except the first token of a text is
    predicted once. The context of a token is the part of its window before the token.

    Raises:
        UserError: If no text has two tokens.
    """
    import torch  # noqa: PLC0415 - help is printed without torch
    from torch.nn import functional as F  # noqa: PLC0415 - as torch

    loss = num_right = num_tokens = num_bytes = 0.0
    for text in texts:
        tokens = result.tokenizer.encode_offsets(text, adds_special=True)
        if len(tokens.ids) < 2:
            continue
        num_bytes += len(text.encode()) - _bytes_before_labels(text, tokens)
        for ids in _windows(tokens.ids, length):
            inputs_L = torch.tensor([ids], device=result.model.device)
            with torch.no_grad():
                logits_LV = result.model(input_ids=inputs_L[:, :-1], use_cache=False).logits[0].float()
            labels_L = inputs_L[0, 1:]
            loss += F.cross_entropy(logits_LV, labels_L, reduction="sum").item()
            num_right += logits_LV.argmax(dim=-1).eq(labels_L).sum().item()
            num_tokens += len(labels_L)
    if not num_tokens:
        raise UserError("every text has fewer than two tokens; expected at least one token to predict.")
    bits = loss / math.log(2) / max(num_bytes, 1)
    return TextScore(loss / num_tokens, num_right / num_tokens, bits, int(num_tokens))


def _windows(ids: list[int], length: int) -> Iterator[list[int]]:
    for start in range(0, len(ids) - 1, length):
        yield ids[start : start + length + 1]


def _bytes_before_labels(text: str, tokens: Any) -> float:
    """Return the number of bytes of a text up to the end of its first token, which is not predicted.

    The bytes of characters that the first token shares with the next ones are counted by the lengths of the tokens,
    which are bytes in byte-level vocabularies, or else in equal parts.
    """
    start, stop = tokens.offsets[0]
    shared, end = [tokens.tokens[0]], stop
    for (first, last), token in zip(tokens.offsets[1:], tokens.tokens[1:], strict=True):
        if first >= end or first == last:
            break
        shared.append(token)
        end = last
    if len(shared) == 1:
        return len(text[:stop].encode())
    num_bytes, lengths = len(text[start:end].encode()), [len(token) for token in shared]
    own = lengths[0] if sum(lengths) == num_bytes else num_bytes / len(shared)
    is_added = shared[0] in ("Ġ", "▁") and not text[start:].startswith(" ")  # a space that the tokenizer adds
    return len(text[:start].encode()) + (0 if is_added else own)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and print one line of JSON.

    Raises:
        UserError: If the folder, the data or an option is invalid, or `--tasks` is given and lm-eval is not installed.
    """
    parser = argparse.ArgumentParser(
        prog="d9d-eval",
        description="Measure the result of a run: perplexity and accuracy on text, or tasks of lm-eval.",
    )
    parser.add_argument("path", help="folder of a run, of adapters, or of a model in Hugging Face layout")
    add_base_options(parser)
    parser.add_argument("--data", type=Path, help="file .jsonl, .json, .parquet, .csv or text, or folder of .txt files")
    parser.add_argument(
        "--field", default="text", help="field of a sample that contains the text; default: %(default)s"
    )
    parser.add_argument("--length", type=int, default=1024, help="predicted tokens per window; default: %(default)s")
    parser.add_argument("--limit", type=int, help="number of documents, or of examples per task; default: all")
    parser.add_argument("--tasks", help="tasks of lm-eval, separated by commas")
    parser.add_argument("--device", help="device of the model; default: the accelerator, if there is one, else the CPU")
    options = parser.parse_args(arguments)
    if (options.data is None) == (options.tasks is None):
        got = "neither --data nor --tasks" if options.data is None else "both --data and --tasks"
        raise UserError(f"got {got}; expected one of --data (a text or .jsonl file) and --tasks (of lm-eval).")
    if options.length < 1 or (options.limit is not None and options.limit < 1):
        raise UserError(f"--length {options.length}, --limit {options.limit}; expected at least 1.")
    device = choose_device(options.device)
    with redirect_stdout(sys.stderr):  # messages of other code are not JSON
        found = _run_tasks(options, device) if options.tasks is not None else _score(options, device)
    print(json.dumps(found, default=str))


def _score(options: argparse.Namespace, device: "torch.device") -> dict[str, object]:
    from d9d_metrics.trackers.values import to_json  # noqa: PLC0415 - imports torch

    texts = list(islice(data.TextFiles([options.data], field=options.field), options.limit))
    if not texts:
        raise UserError(f"{options.data} contains no text; expected at least one document.")
    result = results.load_result(options.path, device=device, base=options.base, weights=options.base_weights)
    length = min(options.length, result.max_context or options.length)
    score = score_texts(result, texts, length=length)
    return {
        "model": str(result.adapted or result.folder),
        "data": str(options.data),
        "loss": to_json(score.loss),
        "perplexity": to_json(score.perplexity),
        "accuracy": score.accuracy,
        "bits_per_byte": to_json(score.bits_per_byte),
        "tokens": score.num_tokens,
        "documents": len(texts),
        "length": length,
    }


def _run_tasks(options: argparse.Namespace, device: "torch.device") -> dict[str, object]:
    from d9d_loop.result.loaded_result import find_export  # noqa: PLC0415 - imports torch

    folder = find_export(Path(options.path))
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"--tasks with {folder}, which holds only adapters; expected a whole model. Merge them first: d9d-export "
            f"{options.path}"
        )
    if find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-eval, which is not installed. Install it: pip install lm-eval.")
    evaluated = import_module("lm_eval").simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder)},
        tasks=options.tasks.split(","),
        limit=options.limit,
        device=str(device),
    )
    return {"model": str(folder), "tasks": evaluated["results"]}


run = cli_main()(main)
"""Entry point of `d9d-eval`."""


if __name__ == "__main__":
    run()
