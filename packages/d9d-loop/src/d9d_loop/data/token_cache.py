"""Cache of token files: the first job that needs a file writes it, later jobs open it."""

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
    """Open the token file of some documents, and write it first if the cache does not contain it.

    The cache key is `name` with a digest of the documents and `vocab_size`. All ranks of a job may call this at once:
    each rank writes a temporary folder, and the first rank to finish renames its folder into place. If tokenizing takes
    too long, write a token file before the job starts with `python -m d9d_loop.data`.

    Args:
        documents: Text, or other data to tokenize. Documents without tokens are skipped.
        cache: Folder of token files.
        tokenize: Tokenizes a document; by default, each byte is a token.
        name: Identifies `tokenize` in the cache key, since a function has no digest.
        vocab_size: Vocabulary size.

    Raises:
        UserError: If no document has tokens, or a token is outside the vocabulary.
    """
    folder = Path(cache, f"{name.replace('/', '-')}-{_digest(documents, vocab_size)}")
    if not folder.exists():
        try:
            with TokenFileWriter(folder, vocab_size=vocab_size, about={"tokenizer": name}) as writer:
                for document in documents:
                    if len(tokens := tokenize(document)):
                        writer.append(tokens)
        except (OSError, ValueError):  # if the folder exists now, another rank has written it
            if not folder.exists():
                raise
    return TokenFile(folder)


def _digest(documents: Sequence[bytes], vocab_size: int) -> str:
    digest = hashlib.sha256(str(vocab_size).encode())
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + document)
    return digest.hexdigest()[:16]
