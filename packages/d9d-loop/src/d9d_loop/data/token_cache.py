"""Token files that are written by the first job that needs them, and opened by all others."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from d9d_loop.data.token_file import TokenFile
from d9d_loop.data.token_file_writer import TokenFileWriter


def cached_token_file(
    documents: Sequence[bytes],
    cache: str | Path,
    *,
    tokenize: Callable[[bytes], Sequence[int] | Tensor] = list,
    name: str = "bytes",
    vocab_size: int = 256,
) -> TokenFile:
    """The token file of documents, which is looked for by their digest, and written if it is not there.

    All ranks of a job may call it at once: each writes for itself, and the one that is done first stays. Where that
    takes too long, write the file before the job starts: `python -m d9d_loop.data`.

    Args:
        documents: Text, or whatever else the tokens are made of; those without a token are left out.
        cache: Folder of token files.
        tokenize: Makes the tokens of a document; by default, each byte is one.
        name: Names what `tokenize` does, in place of the function itself, which has no digest.
        vocab_size: Number of different tokens.

    Raises:
        UserError: If there is no token at all, or one is outside of the vocabulary.
    """
    folder = Path(cache, f"{name.replace('/', '-')}-{_digest(documents, vocab_size)}")
    if not folder.exists():
        try:
            with TokenFileWriter(folder, vocab_size=vocab_size, about={"tokenizer": name}) as writer:
                for document in documents:
                    if len(tokens := tokenize(document)):
                        writer.append(tokens)
        except (OSError, ValueError):  # a rank that was faster, if it is there now
            if not folder.exists():
                raise
    return TokenFile(folder)


def _digest(documents: Sequence[bytes], vocab_size: int) -> str:
    digest = hashlib.sha256(str(vocab_size).encode())
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + document)
    return digest.hexdigest()[:16]
