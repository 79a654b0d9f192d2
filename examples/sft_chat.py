"""Teach the model that pretrain.py exported to answer questions about the standard library, with LoRA.

Questions and answers are made from docstrings; only answers contribute to the loss. Questions about a function have
several wordings, one of which is held out. The script asks the model held-out questions, saves the adapters, and
exports the merged model.
"""

from collections.abc import Mapping, Sequence
from operator import eq
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from finetune_lora import FinetuneConfig, export, lora_decoder
from pydantic import Field, JsonValue, PositiveInt
from source_docstrings import LONGEST, WORDINGS, byte_chat, documented
from source_text import Text
from torch.nn.utils.rnn import pad_sequence

from d9d_loop import Finished, Trainer, cli_main
from d9d_loop.data import ChatData
from d9d_loop.tasks import NextTokenTask
from d9d_modules import generate


class SftConfig(FinetuneConfig):
    question: str = Field("What is shutil.rmtree for?", description="Held-out question whose answer is printed.")
    num_asked: PositiveInt = Field(64, description="Number of held-out questions that are asked at the end.")


def conversations(text: Text) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and held-out conversations; one wording of each function is held out."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for function, sentence in documented(text).items():
        for number, wording in enumerate(WORDINGS):
            is_held_out = crc32(function.encode()) % len(WORDINGS) == number
            parts[is_held_out].append(
                {
                    "messages": [
                        {"role": "user", "content": wording.format(function)},
                        {"role": "assistant", "content": sentence},
                    ]
                }
            )
    return parts


def answers(done: Finished, questions: Sequence[str]) -> list[str]:
    """Return the model's greedy answers. Collective."""
    prompts = [torch.tensor(list(f"Q: {question}\nA: ".encode())) for question in questions]
    ids = pad_sequence(prompts, batch_first=True, padding_side="left")  # 0 is not a byte of a prompt
    written = generate(
        done.for_generation(),
        ids.to(done.ctx.device),
        prompt_mask=(ids != 0).to(done.ctx.device),
        max_new_tokens=LONGEST + 1,
        max_context=ids.shape[1] + LONGEST + 1,
        stop_tokens=[0],
        temperature=0,
    ).token_ids
    return [bytes(row).split(b"\0")[0].decode(errors="replace") for row in written[:, ids.shape[1] :].tolist()]


def report(done: Finished, held_out: Sequence[Mapping[str, Any]], question: str) -> dict[str, JsonValue]:
    """Ask `question` and the held-out questions; print its answer, return the fraction of exact answers. Collective."""
    asked, expected = zip(*((message["content"] for message in each["messages"]) for each in held_out), strict=True)
    answer, *given = answers(done, [question, *asked])
    if done.ctx.is_main_process:
        print(f"{question}\n{answer}\n")
    return {"exact_answers": sum(map(eq, given, expected)) / len(given), "question": question, "answer": answer}


def main() -> None:
    config = SftConfig.from_cli(Path(__file__).with_suffix(".toml"))
    provider, source = lora_decoder(config.initial_weights, config.lora)
    train, held_out = conversations(config.text)
    data = ChatData(train, held_out=held_out, tokenizer=byte_chat(), row_length=config.text.length)
    trainer = Trainer(config, model=provider, data=data, task=NextTokenTask())
    trainer.events.on(
        Finished,
        lambda done: export(done, provider, source, report(done, held_out[: config.num_asked], config.question)),
    )
    trainer.train()


if __name__ == "__main__":
    with cli_main():
        main()
