"""Tokenization of text files into a token file, once for many jobs. The command is `python -m d9d_loop.data`."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_loop.data.sample_files import file_kind, is_saved_dataset, open_samples
from d9d_loop.data.text_tokenizer import END_TOKEN, TextTokenizer, check_tokenizers, read_text_tokenizer
from d9d_loop.data.token_file import TokenFile
from d9d_loop.data.token_file_writer import TokenFileWriter

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DOCUMENTS_AT_A_TIME = 256


@final
@dataclass(frozen=True, slots=True)
class TextFiles:
    """Text documents of files in any format of `open_samples`: a sample of a table, or a whole text file.

    Attributes:
        paths: Files, folders of `datasets.save_to_disk`, and other folders, which are searched with `pattern`.
        pattern: Glob pattern for files in a folder.
        field: Field of a sample that holds the text, such as the key in a `.jsonl` line.
    """

    paths: Sequence[Path]
    pattern: str = "**/*.txt"
    field: str = "text"

    def files(self) -> list[Path]:
        """Return all files, in the order of `paths`; the files of a folder are sorted by path.

        Raises:
            UserError: If a path does not exist, or no file is found.
        """
        files: list[Path] = []
        for path in self.paths:
            if not path.exists():
                raise UserError(f"{path} does not exist; expected a text file, a .jsonl file, or a folder of these.")
            is_one = not path.is_dir() or is_saved_dataset(path)
            files += [path] if is_one else sorted(file for file in path.glob(self.pattern) if file.is_file())
        if not files:
            paths = ", ".join(map(str, self.paths))
            raise UserError(f"no files match {self.pattern} in {paths}; choose another --pattern.")
        return files

    def __iter__(self) -> Iterator[str]:
        """Iterate over the text of all documents, skipping empty documents and lines.

        Raises:
            UserError: If a file cannot be read, or a sample has no text in `field`.
        """
        for _, files in groupby(self.files(), key=partial(file_kind, key="paths")):
            samples = open_samples(list(files), key="paths", text_field=self.field)
            for index, sample in enumerate(samples):
                text = sample.get(self.field)
                if not isinstance(text, str):
                    raise UserError(
                        f"{samples.place(index)}: expected a text in the field {self.field!r}; got the fields "
                        f"{', '.join(sample)}. Choose another field with --field, or correct the sample."
                    )
                if text:
                    yield text


def train_tokenizer(documents: Iterable[str], *, vocab_size: int, end_token: str = END_TOKEN) -> "Tokenizer":
    """Train a byte-level BPE tokenizer, which can encode any text. Requires `tokenizers`.

    The vocabulary has the 256 bytes and `end_token`, which ends a document; `vocab_size` below 257 raises `UserError`.
    """
    if vocab_size < 257:
        raise UserError(f"vocab_size = {vocab_size}; expected at least 257: one for each byte, and the end token.")
    check_tokenizers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - optional

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[end_token], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(iter(documents), trainer)
    return tokenizer


def is_held_out(text: str, part: float) -> bool:
    """Return True if a document is in the held-out fraction `part`, from 0 to 1.

    A hash of the text decides, so duplicates are in the same part.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") < part * 2**64


def tokenize_text(
    documents: Iterable[str], folder: str | Path, *, tokenizer: str | Path | TextTokenizer, end_token: str | None = None
) -> TokenFile:
    """Tokenize documents, write them to a token file, and open it. Requires `tokenizers`.

    The tokens are those of a pretraining job on the same texts: with the special tokens that the tokenizer adds, and
    with `end_token` at the end of each document; jobs and the command skip empty texts. `tokenizer` is a tokenizer,
    its `tokenizer.json`, or a model folder.

    Raises:
        UserError: If the tokenizer cannot be read or lacks `end_token`, the folder exists, or there are no documents.
    """
    if not isinstance(tokenizer, TextTokenizer):
        tokenizer = read_text_tokenizer(tokenizer, key="--tokenizer")
    end = end_token_id(tokenizer, end_token, key="--end-token")
    about: dict[str, JsonValue] = {
        "tokenizer_identity": tokenizer.identity(),
        "vocab_size": tokenizer.vocab_size,
        "end_token": end_token,
    }
    waiting = iter(documents)
    with TokenFileWriter(folder, vocab_size=tokenizer.vocab_size, about=about) as writer:
        while texts := list(islice(waiting, _DOCUMENTS_AT_A_TIME)):
            for tokens in filter(None, tokenizer.encode_documents(texts, end=end)):
                writer.append(tokens)
    return TokenFile(folder)


def end_token_id(tokenizer: TextTokenizer, end_token: str | None, *, key: str) -> int | None:
    """Return the id of the token that ends each document; `UserError` with `key` if the tokenizer lacks it."""
    if end_token is None:
        return None
    if (found := tokenizer.token_id(end_token)) is None:
        raise UserError(
            f"the tokenizer has no end token {end_token!r}; expected one of its tokens. Name another one with {key}, "
            "or name none."
        )
    return found
