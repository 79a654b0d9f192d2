"""Direct preference optimization of the model that pretrain.py exported, with LoRA: short answers are preferred.

The preference is made by a rule: of a docstring's first sentence and the whole docstring, the first sentence is
chosen. The reference is the same model with its adapters off. The script prints the reward margin of each step.
"""

import json
from pathlib import Path
from typing import Any

from finetune_lora import Lora
from pretrain import Text
from pydantic import PositiveInt
from sft_chat import byte_chat, lora_decoder, questions
from torch.utils.data import default_collate

from d9d_loop import Engine, EngineConfig, cli_main
from d9d_loop.data import ChatData, Share, StreamLoader
from d9d_loop.losses import PreferenceLoss
from d9d_loop.tasks import PreferenceTask
from d9d_peft import adapters_off

MAX_CONTEXT = 256  # of the model; a row has several conversations


class DpoConfig(EngineConfig):
    steps: PositiveInt = 40
    batch_size: PositiveInt = 16
    microbatch_size: PositiveInt = 8
    beta: float = 0.1
    text: Text = Text()
    lora: Lora


def pairs(text: Text) -> list[dict[str, Any]]:
    """Return questions with a short and a long answer."""
    found = []
    for sample in questions(text):
        question, answer = (message["content"] for message in sample["messages"])
        first, rest = answer.partition(". ")[::2]
        if len(rest) > 20 and len(question) + len(answer) < MAX_CONTEXT - 10:  # both with their headers
            found.append({"prompt": question, "chosen": f"{first}.", "rejected": answer})
    return found


def main() -> None:
    config = DpoConfig.from_cli(Path(__file__).with_suffix(".toml"))
    provider, _ = lora_decoder(config.initial_weights, config.lora)
    task = PreferenceTask(PreferenceLoss(beta=config.beta))
    data = ChatData(
        pairs(config.text), tokenizer=byte_chat(), row_length=config.text.length, kind="pairs", too_long="drop"
    )
    with Engine.open(config, model=provider, task=task, reference=adapters_off) as engine:
        ctx = engine.ctx
        dp_size = ctx.size("batch", "dp")
        num_microbatches = config.batch_size // config.microbatch_size // dp_size
        share = Share(config.microbatch_size, num_microbatches, ctx.coordinate("batch", "dp"), dp_size)
        loader = StreamLoader(data.training(seed=config.seed), share, seed=config.seed, collate=default_collate)
        losses: list[float] = []
        for number, batches in zip(range(config.steps), loader, strict=False):
            with engine.reference():
                scores = engine.score(batches)
            scored = [
                {**batch, "reference_log_probs": each["log_probs"]} for batch, each in zip(batches, scores, strict=True)
            ]
            engine.forward_backward(scored, task.loss)
            losses.append(engine.step().loss.item())
            if ctx.is_main_process and number % 5 == 0:
                print(f"step {number}: loss {losses[-1]:.4f}", flush=True)
        if ctx.is_main_process:
            print(json.dumps({"first": losses[0], "last": losses[-1], "losses": losses}))


if __name__ == "__main__":
    with cli_main():
        main()
