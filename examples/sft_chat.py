"""Teach the model that pretrain.py exported to answer questions about the standard library, with LoRA.

Questions and answers are made from docstrings; only answers contribute to the loss. Questions about a function have
several wordings, one of which is held out. The script asks the model held-out questions, saves the adapters, and
exports the merged model.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import eq
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from finetune_lora import FinetuneConfig, Lora, LoraDecoder, export
from pretrain import Decoder
from pydantic import Field, JsonValue, PositiveInt
from source_text import Text
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence

from d9d_dist import UserError
from d9d_loop import Finished, Trainer, cli_main, read_config_file
from d9d_loop.data import ChatData, ChatTemplate, ChatTokenizer
from d9d_loop.tasks import NextTokenTask
from d9d_modules import QWEN3, generate
from d9d_peft import LoRA

WORDINGS = ("What does {} do?", "What is {} for?", "Explain {}.")
LONGEST = 100  # bytes of an answer
END = "<|end|>"
TEMPLATE = """{%- for message in messages -%}
{{ ('Q: ' + message.content if message.role == 'user' else 'A: ' + message.content + '<|end|>') + '\n' }}
{%- endfor -%}
{{- 'A: ' if add_generation_prompt else '' -}}"""


class SftConfig(FinetuneConfig):
    question: str = Field("What is shutil.rmtree for?", description="Held-out question whose answer is printed.")
    num_asked: PositiveInt = Field(64, description="Number of held-out questions that are asked at the end.")


def byte_chat() -> ChatTokenizer:
    """Return a byte tokenizer as in pretrain.py; byte 0, which the text does not contain, ends an answer."""
    printable = {
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    }  # the others are written as characters from 256 on
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(256 + others.index(byte)) if byte in others else chr(byte): byte for byte in range(1, 256)}
    tokenizer = Tokenizer(models.BPE(vocab={END: 0, **vocab}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return ChatTokenizer(tokenizer, ChatTemplate(TEMPLATE))


def documented(text: Text) -> dict[str, str]:
    """Return the first sentence of the docstring of each public function, by `module.function`."""
    found = {}
    for path in sorted(text.folder.glob(text.pattern)):
        with suppress(SyntaxError):  # some files of lib2to3 contain syntax errors on purpose
            for node in ast.parse(path.read_bytes()).body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                    sentence = re.split(r"(?<=\.)\s", paragraph)[0]
                    if 10 < len(sentence) <= LONGEST and sentence.endswith("."):
                        found[f"{path.stem}.{node.name}"] = sentence
    return found


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


def lora_decoder(source: Path | None, lora: Lora) -> tuple[LoraDecoder, Path]:
    """Return the model of pretrain.py with adapters, and the folder of its weights."""
    if source is None or not source.is_dir():
        raise UserError(f"initial_weights = {source} does not exist; run examples/pretrain.py first.")
    params = QWEN3.read(read_config_file(source / "config.json"))
    return LoraDecoder(Decoder(params), LoRA(**lora.model_dump())), source


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
