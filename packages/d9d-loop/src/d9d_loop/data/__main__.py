"""Command that tokenizes text or conversations into token files.

python -m d9d_loop.data books/ notes.txt crawl.jsonl --output tokens --tokenizer tokenizer.json
python -m d9d_loop.data chats.jsonl --chat --output tokens --tokenizer Qwen3-0.6B --show 3
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_loop import data
from d9d_loop.cli_main import cli_main
from d9d_loop.data.chat_template import TRAINING_DATE
from d9d_loop.data.chat_tokenizer import mark_spans, read_chat_tokenizer
from d9d_loop.data.conversation import ChatLabels, TextPairs, TooLong, read_conversation
from d9d_loop.data.text_tokenizer import END_TOKEN

if TYPE_CHECKING:
    from d9d_loop.data import TextFiles, TokenFile
    from d9d_loop.data.sample_files import DataFiles

_OF_TEXTS = ("train_vocab_size", "pattern", "field", "end_token", "output_format")
_OF_CHATS = ("max_length", "date", "too_long", "labels", "text_pairs", "show")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and print one line of JSON for each token file. Help is printed without importing torch."""
    parser = argparse.ArgumentParser(prog="python -m d9d_loop.data", description="Write text as a token file.")
    parser.add_argument(
        "paths", type=Path, nargs="+", help="files .jsonl, .json, .parquet, .csv or text, and folders of these"
    )
    parser.add_argument("--output", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="tokenizer.json of a model; with --chat, the folder of a model"
    )
    parser.add_argument("--train-vocab-size", type=int, help="train the tokenizer first, with this vocabulary size")
    parser.add_argument("--pattern", default="**/*.txt", help="glob pattern of files in a folder; default: %(default)s")
    parser.add_argument(
        "--field", default="text", help="field of a sample that contains the text; default: %(default)s"
    )
    parser.add_argument(
        "--output-format",
        choices=("d9d", "megatron", "llm.c", "nanogpt"),
        default="d9d",
        help="a folder OUTPUT of d9d; OUTPUT.bin and OUTPUT.idx of Megatron-LM; or OUTPUT.bin of llm.c or nanoGPT; "
        "default: %(default)s",
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--end-token", help="token that ends each document, such as <|endoftext|>; default: none")
    end.add_argument("--no-end-token", action="store_const", dest="end_token", const=None, help="append no token")
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.0,
        help="fraction of the documents or conversations to write to OUTPUT/held_out; the others are written to "
        "OUTPUT/train",
    )
    chat = parser.add_argument_group("conversations")
    chat.add_argument("--chat", action="store_true", help="read conversations and write loss masks")
    chat.add_argument("--max-length", type=int, help="maximum length of a conversation, in tokens")
    chat.add_argument(
        "--date",
        type=date.fromisoformat,
        default=TRAINING_DATE,
        help="date that a chat template prints as the current one; default: %(default)s",
    )
    chat.add_argument(
        "--too-long",
        choices=get_args(TooLong),
        default="refuse",
        help="treatment of longer conversations; default: %(default)s",
    )
    chat.add_argument(
        "--labels",
        choices=get_args(ChatLabels),
        default="assistant",
        help="tokens that contribute to the loss: the assistant's turns, or all except for a prompt; default: "
        "%(default)s",
    )
    chat.add_argument(
        "--text-pairs",
        choices=get_args(TextPairs),
        default="chat",
        help="treatment of a prompt and a completion that are texts; default: %(default)s",
    )
    chat.add_argument("--show", type=int, default=0, metavar="N", help="print N conversations with their loss masks")
    options = parser.parse_args(arguments)
    if options.output is None and not (options.chat and options.show):
        parser.error("the following arguments are required: --output")
    _check(options, parser)
    kinds = {"train": False, "held_out": True} if options.held_out else {"": False}
    tokenize = _tokenize_chats if options.chat else _tokenize_texts
    tokenize(options, {Path(options.output or "", name): is_held_out for name, is_held_out in kinds.items()})


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise `UserError` for a value that is out of range, and for an option that would have no effect."""
    if options.max_length is not None and options.max_length < 2:
        raise UserError(f"--max-length {options.max_length}; expected at least 2 tokens.")
    if not 0 <= options.held_out < 1:
        raise UserError(f"--held-out {options.held_out}; expected a fraction of at least 0 and less than 1.")
    for name in _OF_TEXTS if options.chat else _OF_CHATS:
        if getattr(options, name) != parser.get_default(name):
            raise UserError(
                f"--{name.replace('_', '-')} {'with' if options.chat else 'without'} --chat; expected it only "
                f"{'without' if options.chat else 'with'} --chat, because it has no effect on "
                f"{'conversations' if options.chat else 'texts'}. Remove it."
            )


def _tokenize_texts(options: argparse.Namespace, folders: Mapping[Path, bool]) -> None:
    documents = data.TextFiles(options.paths, pattern=options.pattern, field=options.field)
    if options.train_vocab_size is not None:
        _train(documents, options.tokenizer, vocab_size=options.train_vocab_size, end_token=options.end_token)
    for folder, wanted in folders.items():
        chosen = (text for text in documents if data.is_held_out(text, options.held_out) == wanted)
        if options.output_format == "d9d":
            file = data.tokenize_text(chosen, folder, tokenizer=options.tokenizer, end_token=options.end_token)
            _report(folder, file)
            continue
        for path in (folder.with_name(f"{folder.name}{suffix}") for suffix in (".bin", ".idx")):
            if path.exists():
                raise UserError(f"{path} already exists; expected a new file. Remove it, or choose another --output.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tokens-") as temporary:
            file = data.tokenize_text(
                chosen, Path(temporary, "tokens"), tokenizer=options.tokenizer, end_token=options.end_token
            )
            data.write_tokens(file, folder, options.output_format)
            _report(folder, file)


def _tokenize_chats(options: argparse.Namespace, folders: Mapping[Path, bool]) -> None:
    tokenizer = read_chat_tokenizer(
        options.tokenizer, today=options.date, labels=options.labels, text_pairs=options.text_pairs
    )
    samples = data.open_samples(options.paths, key="paths")
    for number in range(min(options.show, len(samples))):
        print(f"--- conversation {number}")
        chat = tokenizer(read_conversation(samples[number]))
        print(mark_spans(chat.text, chat.spans, in_color=sys.stdout.isatty()))
    if options.output is None:
        return
    longest = None if options.max_length is None else options.max_length - 1
    for folder, wanted in folders.items():
        chosen = _conversations(samples, held_out=options.held_out, wanted=wanted)
        file = data.tokenize_chats(chosen, folder, tokenizer=tokenizer, max_length=longest, too_long=options.too_long)
        about = file.manifest.about
        _report(folder, file, dropped=about["dropped"], cut=about["cut"])


def _conversations(samples: "DataFiles", *, held_out: float, wanted: bool) -> Iterator[Any]:
    """Yield the samples of one part. The messages decide, so duplicates are in the same part."""
    for index, sample in enumerate(samples):
        try:
            conversation = read_conversation(sample)
        except UserError as error:
            raise UserError(f"{samples.place(index)}: {error}") from None
        if data.is_held_out(conversation.to_json(), held_out) == wanted:
            yield sample


def _report(folder: Path, file: "TokenFile", **counts: JsonValue) -> None:
    given = file.manifest
    sizes = {"documents": given.num_documents, "tokens": given.num_tokens, **counts, "dtype": given.dtype}
    print(json.dumps({"folder": str(folder), **sizes}))


def _train(documents: "TextFiles", path: Path, *, vocab_size: int, end_token: str | None) -> None:
    if path.exists():
        raise UserError(
            f"the tokenizer {path} already exists; omit --train-vocab-size to use it, or name another path."
        )
    trained = data.train_tokenizer(documents, vocab_size=vocab_size, end_token=end_token or END_TOKEN)
    path.parent.mkdir(parents=True, exist_ok=True)
    trained.save(str(path))


run = cli_main()(main)
"""Entry point of `d9d-tokenize`."""


if __name__ == "__main__":
    run()
