"""Teach the model that pretrain.py exported to answer questions about the standard library, with LoRA.

Questions and answers are made from docstrings; only answers are trained. The script answers one question, saves the
adapters, and exports the merged model.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune_lora import FinetuneConfig, Lora, LoraDecoder, export
from pretrain import Decoder, Text, continue_text
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from d9d_dist import UserError
from d9d_loop import Finished, Trainer, cli_main, read_config_file
from d9d_loop.data import ChatData, ChatTemplate, ChatTokenizer, is_held_out
from d9d_loop.tasks import NextTokenTask
from d9d_modules import QWEN3
from d9d_peft import LoRA

END = "<|end|>"
TEMPLATE = """{%- for message in messages -%}
{{ ('Q: ' + message.content if message.role == 'user' else 'A: ' + message.content + '<|end|>') + '\n' }}
{%- endfor -%}
{{- 'A: ' if add_generation_prompt else '' -}}"""


def byte_chat() -> ChatTokenizer:
    """Return a tokenizer of bytes, as pretrain.py has it; the byte 0, which text does not contain, ends an answer."""
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


def questions(text: Text) -> Iterator[dict[str, Any]]:
    """Yield a question and its answer for each documented function of the modules in a folder."""
    for path in sorted(text.folder.glob(text.pattern)):
        if {"site-packages", "test"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # some files of lib2to3 are examples of such
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (documentation := ast.get_docstring(node) or ""):
                answer = " ".join(documentation.split("\n\n")[0].split())
                yield chat(f"What does {path.stem}.{node.name} do?", answer)


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def answer(done: Finished, question: str, max_context: int) -> None:
    """Print the model's answer to a question. Collective."""
    written = continue_text(
        done, f"Q: {question}\nA: ", max_context=max_context, max_new_tokens=max_context // 2, temperature=0
    )
    if done.ctx.is_main_process:
        print(written.split("\0")[0], end="\n\n")


def lora_decoder(source: Path | None, lora: Lora) -> tuple[LoraDecoder, Path]:
    """Return the model of pretrain.py with adapters, and the folder of its weights."""
    if source is None or not source.is_dir():
        raise UserError(f"initial_weights = {source} is not there; run examples/pretrain.py first.")
    params = QWEN3.read(read_config_file(source / "config.json"))
    return LoraDecoder(Decoder(params), LoRA(**lora.model_dump())), source


def main() -> None:
    config = FinetuneConfig.from_cli(Path(__file__).with_suffix(".toml"))
    provider, source = lora_decoder(config.initial_weights, config.lora)
    held_out: tuple[list[Any], list[Any]] = ([], [])
    for each in questions(config.text):
        held_out[is_held_out(each["messages"][0]["content"], 0.1)].append(each)
    length = config.text.length
    data = ChatData(held_out[False], held_out=held_out[True], tokenizer=byte_chat(), row_length=length, too_long="drop")
    trainer = Trainer(config, model=provider, data=data, task=NextTokenTask())
    trainer.events.on(Finished, lambda done: answer(done, "What does json.dumps do?", length))
    trainer.events.on(Finished, lambda done: export(done, provider, source))
    trainer.train()


if __name__ == "__main__":
    with cli_main():
        main()
