"""One function opens tokens in any format: it recognises the format by the contents of the path."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.data.megatron_tokens import megatron_files, megatron_part, megatron_prefix, write_megatron
from d9d_loop.data.sample_files import is_saved_dataset
from d9d_loop.data.stored_tokens import StoredTokens, TokenDocuments, TokenPart
from d9d_loop.data.token_file import MANIFEST, TokenFile
from d9d_loop.data.token_shards import TOKEN_FIELDS, bin_part, indexed_parts, write_bin

TokenFormat: TypeAlias = Literal["d9d", "Megatron-LM", ".bin", "index.json", "saved dataset"]
_MASKS = ("labels", "attention_mask")
_DOCUMENT_BITS = 32


def token_format(path: Path, *, text_field: str | None = None) -> TokenFormat | None:
    """Return the format of stored tokens, or None if the path has none, or has texts in the column `text_field`."""
    if (path / MANIFEST).is_file():
        return "d9d"
    if path.is_dir() and (path / "index.json").is_file():
        return "index.json"
    if megatron_prefix(path) is not None:
        return "Megatron-LM"
    if path.suffix == ".bin" and path.is_file():
        return ".bin"
    features = _features(path) if is_saved_dataset(path) else {}
    return "saved dataset" if text_field not in features and features.keys() & set(TOKEN_FIELDS) else None


def open_tokens(path: str | Path | Sequence[str | Path], *, vocab_size: int | None = None) -> TokenDocuments:
    """Open tokens that d9d or another program wrote, or several of another program's files of one format, in order.

    `path` is one of these, or a list of them:

    - a folder of `TokenFileWriter` or `d9d-tokenize`;
    - the prefix, the `.idx` or the `.bin` of an indexed dataset of Megatron-LM, of any integer dtype;
    - a `.bin` file of llm.c, or of nanoGPT. It has no document boundaries: use `TokenWindows`;
    - a folder of MosaicML's `MDSWriter` with a column `tokens` or `input_ids`: a sample is a document;
    - a folder of litdata, written for `TokensLoader`: an item is a document;
    - a folder of `datasets.save_to_disk` with a column `input_ids` or `tokens`. Requires `datasets`.

    Tokens outside of `vocab_size` raise `UserError`: some are read when they are opened, the others when they are used.

    Raises:
        UserError: If a path has no tokens, the formats differ, or a file is truncated or damaged.
    """
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(each) for each in path]
    formats = {each: token_format(each) for each in paths}
    if None in formats.values():
        lacking = next(each for each, name in formats.items() if name is None)
        raise UserError(
            f"{lacking} {'has no tokens' if lacking.exists() else 'does not exist'}; expected a token file, or tokens "
            "of Megatron-LM, nanoGPT, llm.c, MosaicML, litdata or datasets. Check the path."
        )
    if len(set(formats.values())) != 1:
        found = ", ".join(f"{each}: {name}" for each, name in formats.items())
        raise UserError(f"got tokens of several formats ({found}); expected one format. Convert some.")
    (name,) = set(formats.values())
    if name == "d9d":
        if len(paths) > 1:
            raise UserError(f"got {len(paths)} token files; expected one. Write one token file.")
        return TokenFile(paths[0])
    parts, files = [], []
    for each in paths:
        opened = _open(name, each)
        parts += opened
        files += _files(name, each, opened)
    reopen = partial(open_tokens, paths, vocab_size=vocab_size)
    return StoredTokens(parts, files=files, reopen=reopen, vocab_size=vocab_size)


def write_tokens(
    file: TokenDocuments,
    prefix: str | Path,
    to: Literal["megatron", "llm.c", "nanogpt"],
    *,
    vocab_size: int | None = None,
) -> None:
    """Write documents as `PREFIX.bin` of another program, with `PREFIX.idx` for Megatron-LM.

    nanoGPT and llm.c store no document boundaries. `vocab_size` determines the dtype; by default it is the one that the
    writer of `file` recorded.

    Raises:
        UserError: If `file` has loss masks, the vocabulary size is not known, or the format cannot hold the tokens.
    """
    known = vocab_size or file.about.get("vocab_size")
    if not isinstance(known, int) or file.has_masks:
        raise UserError(
            f"the tokens have {'loss masks' if file.has_masks else 'no recorded vocab_size'}, and {to} needs tokens "
            "without masks and the size of their vocabulary. Pass vocab_size, or tokenize texts."
        )
    if to == "megatron":
        write_megatron(file, Path(prefix), vocab_size=known)
    else:
        write_bin(file, Path(f"{prefix}.bin"), vocab_size=known, header=to == "llm.c")


def _open(name: TokenFormat | None, path: Path) -> list[TokenPart]:
    match name:
        case "Megatron-LM":
            prefix = megatron_prefix(path)
            assert prefix is not None
            return [megatron_part(prefix)]
        case ".bin":
            return [bin_part(path)]
        case "saved dataset":
            return [_arrow_part(path)]
    return indexed_parts(path)


def _files(name: TokenFormat | None, path: Path, parts: Sequence[TokenPart]) -> list[Path]:
    prefix = megatron_prefix(path)
    if name == "Megatron-LM" and prefix is not None:
        return megatron_files(prefix)
    return sorted(path.glob("*.arrow")) if name == "saved dataset" else [part.path for part in parts]


def _features(folder: Path) -> dict[str, Any]:
    """Return the columns of a folder of `save_to_disk`; empty for a folder of splits."""
    info = folder / "dataset_info.json"
    return json.loads(info.read_bytes()).get("features") or {} if info.is_file() else {}


def _arrow_part(folder: Path) -> TokenPart:
    """Open a dataset of rows of tokens; a row is a document. `labels` and `attention_mask` must not mask any token."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{folder} needs the package datasets, which is not installed. Install it: "
            f"{install_hint('d9d-loop', 'huggingface')}."
        ) from None
    try:
        table: Any = datasets.load_from_disk(str(folder)).data
    except Exception as error:  # datasets raises the exceptions of many libraries
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"{folder} cannot be read: {why} Expected a dataset of save_to_disk. Write it again."
        ) from error
    field = next(field for field in TOKEN_FIELDS if field in table.column_names)
    columns = {name: table.column(name) for name in (field, *_MASKS) if name in table.column_names}

    def row(name: str, document: int) -> Tensor:
        values = columns[name][document].values
        return torch.tensor([]) if values is None else torch.tensor(values.to_numpy(zero_copy_only=False))

    def bounds(document: int) -> tuple[int, int]:
        values = columns[field][document].values
        return document << _DOCUMENT_BITS, (document << _DOCUMENT_BITS) + (0 if values is None else len(values))

    def read(start: int, stop: int) -> Tensor:
        document, before = start >> _DOCUMENT_BITS, start >> _DOCUMENT_BITS << _DOCUMENT_BITS
        tokens = row(field, document)
        for name in columns.keys() - {field}:
            if not torch.equal(row(name, document), tokens if name == "labels" else torch.ones_like(tokens)):
                raise UserError(
                    f"{folder}, row {document}: the column {name} masks tokens; expected rows without padding and "
                    f"masks. Remove the column {name}, or cut the tokens that it masks."
                )
        return tokens[start - before : stop - before].long()

    return TokenPart(folder, len(table), len(table) << _DOCUMENT_BITS, bounds, read, is_contiguous=False)
