"""Direct preference optimization (DPO) with LoRA: the model that pretrain.py exported learns to avoid typos.

Both answers of a pair have the same letters; in two words of the rejected answer, neighboring letters are swapped. The
model must therefore learn spelling: length and letters do not differ. The reference is the same model with its
adapters off. The script prints the reward margin on held-out functions.
"""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from finetune_lora import Lora, lora_decoder
from pydantic import PositiveInt
from source_docstrings import WORDINGS, byte_chat, documented
from source_text import Text
from torch.utils.data import default_collate

from d9d_loop import Engine, EngineConfig, cli_main
from d9d_loop.data import ChatData, SampleStream, Share, StreamLoader, is_held_out
from d9d_loop.losses import PreferenceLoss
from d9d_loop.tasks import PreferenceTask
from d9d_modules import IGNORED_LABEL
from d9d_peft import adapters_off


class DpoConfig(EngineConfig):
    steps: PositiveInt = 60
    batch_size: PositiveInt = 4
    microbatch_size: PositiveInt = 4
    evaluation_every: PositiveInt = 15
    held_out_rows: PositiveInt = 16
    beta: float = 0.1
    text: Text = Text()
    lora: Lora


def pairs(text: Text) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training pairs, and pairs of held-out functions."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for function, sentence in documented(text).items():
        rejected = with_typos(sentence, random.Random(function))  # noqa: S311 - no secret
        if rejected is not None:
            pair = {"prompt": WORDINGS[0].format(function), "chosen": sentence, "rejected": rejected}
            parts[is_held_out(function, 0.2)].append(pair)
    return parts


def with_typos(sentence: str, draws: random.Random) -> str | None:
    """Swap two neighboring letters in two words; None if the sentence has too few long words."""
    words = sentence.split(" ")
    swaps = [
        (index, at)
        for index, word in enumerate(words)
        for at in range(1, len(word) - 2)
        if word.isalpha() and word[at] != word[at + 1]
    ]
    if len({index for index, _ in swaps}) < 2:
        return None
    for index in draws.sample(sorted({index for index, _ in swaps}), 2):
        at = draws.choice([at for word, at in swaps if word == index])
        word = words[index]
        words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def pair_stream(found: list[dict[str, Any]], config: DpoConfig) -> SampleStream:
    """Return packed rows of pairs, endless and shuffled."""
    data = ChatData(found, tokenizer=byte_chat(), row_length=config.text.length, kind="pairs")
    return data.training(seed=config.seed)


def with_reference(engine: Engine, batches: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add the log-probabilities of the model with its adapters off. Collective."""
    batches = list(batches)
    with engine.reference():
        scores = engine.score(batches)
    return [{**batch, "reference_log_probs": each["log_probs"]} for batch, each in zip(batches, scores, strict=True)]


def evaluate(engine: Engine, batches: list[dict[str, Any]], loss: PreferenceLoss) -> dict[str, float]:
    """Return the mean reward margin, and the fraction of pairs whose chosen answer has the higher reward."""
    margins = []
    for batch, scores in zip(batches, engine.score(batches), strict=True):
        found, is_pair = loss.margins(
            scores["log_probs"],
            reference_log_probs_BL=batch["reference_log_probs"],
            mask_BL=batch["labels"].to(engine.ctx.device) != IGNORED_LABEL,
            document_ids_BL=batch["documents"].to(engine.ctx.device),
        )
        margins.append(loss.beta * found[is_pair])
    joined = torch.cat(margins)
    return {"margin": joined.mean().item(), "accuracy": (joined > 0).float().mean().item()}


def main() -> None:
    config = DpoConfig.from_cli(Path(__file__).with_suffix(".toml"))
    provider, _ = lora_decoder(config.initial_weights, config.lora)
    loss = PreferenceLoss(beta=config.beta)
    task = PreferenceTask(loss)
    train, held_out = pairs(config.text)
    stream = pair_stream(train, config)
    with Engine.open(config, model=provider, task=task, reference=adapters_off) as engine:
        ctx = engine.ctx
        dp_size = ctx.size("batch", "dp")
        num_microbatches = config.batch_size // config.microbatch_size // dp_size
        share = Share(config.microbatch_size, num_microbatches, ctx.coordinate("batch", "dp"), dp_size)
        loader = StreamLoader(stream, share, seed=config.seed, collate=default_collate)
        unseen_pairs = pair_stream(held_out, config)
        rows = [unseen_pairs.read(entry) for entry in unseen_pairs.cursor().take(config.held_out_rows)]
        unseen = with_reference(engine, [default_collate(rows)])
        losses: list[float] = []
        curve: list[dict[str, float]] = []
        for number, batches in zip(range(config.steps + 1), loader, strict=False):
            if number % config.evaluation_every == 0:
                curve.append({"step": number, **evaluate(engine, unseen, loss)})
                if ctx.is_main_process:
                    print(f"{curve[-1]}  loss {losses[-1] if losses else float('nan'):.4f}", flush=True)
            if number < config.steps:
                engine.forward_backward(with_reference(engine, batches), task.loss)
                losses.append(engine.step().loss.item())
        if ctx.is_main_process:
            print(json.dumps({"losses": losses, "held_out": curve}))


if __name__ == "__main__":
    with cli_main():
        main()
