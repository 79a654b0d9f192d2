"""Tokenizer of models without tokenizer files: tokens are bytes."""

from collections.abc import Sequence
from typing import final

NUM_BYTES = 256


@final
class ByteTokenizer:
    """Tokenizer whose tokens are the bytes of UTF-8 text. Token 256 ends a text."""

    vocab_size = NUM_BYTES + 1
    name = "bytes"
    bos_id = pad_id = None
    eos_id = end_id = NUM_BYTES

    def __call__(self, text: str) -> list[int]:
        """Return the bytes of a text and the end token."""
        return [*text.encode(), NUM_BYTES]

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def prompt(self, text: str, *, special: bool) -> list[int]:
        """Return the bytes of a prompt. `special` has no effect, because a prompt of bytes has no special tokens."""
        del special
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes, without end tokens and without bytes that are not valid UTF-8."""
        return bytes(each for each in ids if each < NUM_BYTES).decode(errors="ignore")
