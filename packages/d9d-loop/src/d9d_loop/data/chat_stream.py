"""Stream of conversations as documents with a loss mask, tokenized while they are read."""

from typing import Any, final

import torch
from pydantic import JsonValue

from d9d_dist import UserError
from d9d_loop.data.chat_tokenizer import ChatTokenizer, ChatTokens
from d9d_loop.data.conversation import TooLong, read_conversation
from d9d_loop.data.document import Document
from d9d_loop.data.masked_text import mark_spans
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream
from d9d_loop.data.window_cursor import WindowCursor

MaskedTokens = tuple[list[int], list[bool]]
"""Tokens of a document, and for each whether it is trained."""


@final
class ChatStream(SampleStream):
    """Documents of conversations: only the assistant's turns are labels. Pack them with `PackedStream`.

    Every rank tokenizes every conversation, since their lengths determine the packing. If that is too slow, write a
    token file with `d9d-tokenize --chat` once, and read it with a `DocumentStream`. An entry is tokens and their mask.

    Args:
        stream: Stream of samples in a form that `read_conversation` accepts, such as an `IndexedStream` of `JsonLines`
            or of a Hugging Face dataset.
        tokenizer: Renders and tokenizes conversations, and verifies their masks.
        max_length: Largest number of positions. For packing, the row length.
        too_long: `refuse` longer conversations with an error, `drop` them, or `truncate` them at the end. A
            conversation without trained tokens after truncation is dropped.
        window: Number of conversations tokenized at a time. A job that resumes inside a window tokenizes it again.

    Raises:
        UserError: If `max_length` or `window` is below 1; when a conversation is read, if it is invalid or too long.
    """

    def __init__(
        self,
        stream: SampleStream,
        tokenizer: ChatTokenizer,
        *,
        max_length: int,
        too_long: TooLong = "refuse",
        window: int = 64,
    ) -> None:
        check_sizes(max_length=max_length, window=window)
        self._stream, self._tokenizer, self._max_length = stream, tokenizer, max_length
        self._too_long: TooLong = too_long
        self._window, self.is_endless = window, stream.is_endless

    def cursor(self, state: JsonValue = None) -> Cursor:
        """Return a cursor. If `state` points into a window, that window is tokenized again."""
        return WindowCursor(self._stream, state, size=self._window, arrange=self._arrange)

    def read(self, entry: MaskedTokens) -> Document:
        """Return the tokens of a conversation and their mask."""
        return to_document(entry)

    def length(self, entry: MaskedTokens) -> int:
        """Return the number of positions of a conversation: its number of tokens minus one."""
        return len(entry[0]) - 1

    def identity(self) -> JsonValue:
        """Return the digest of the tokenizer, the sizes, and the identity of the conversations."""
        options: dict[str, JsonValue] = {"max_length": self._max_length, "too_long": self._too_long}
        of: dict[str, JsonValue] = {"tokenizer": self._tokenizer.identity(), "of": self._stream.identity()}
        return {"chats": {**options, "window": self._window, **of}}

    def _arrange(self, entries: list[Entry], _window: int) -> list[MaskedTokens]:
        chats: list[MaskedTokens] = []
        for entry in entries:
            tokens = self._tokenizer(read_conversation(self._stream.read(entry)))
            fitted = fit_tokens(tokens, max_length=self._max_length, too_long=self._too_long)
            chats += [] if fitted is None else [fitted]
        return chats


def fit_tokens(chat: ChatTokens, *, max_length: int, too_long: TooLong) -> MaskedTokens | None:
    """Return the tokens and mask of a conversation of at most `max_length` positions; None if it is dropped.

    Raises:
        UserError: If the conversation is too long and `too_long` is `refuse`.
    """
    if len(chat.tokens) - 1 <= max_length:
        return chat.tokens, chat.mask
    if too_long == "refuse":
        raise UserError(
            f"a conversation has {len(chat.tokens) - 1} positions; expected at most max_length = {max_length}. Set "
            "too_long to 'drop' or 'truncate', or increase the length. The conversation starts with:\n"
            f"{mark_spans(chat.text[:400], [])}"
        )
    tokens, mask = chat.tokens[: max_length + 1], chat.mask[: max_length + 1]
    return (tokens, mask) if too_long == "truncate" and any(mask[1:]) else None


def to_document(chat: MaskedTokens) -> Document:
    """Return tokens and mask as tensors."""
    tokens, mask = chat
    return {"tokens": torch.tensor(tokens), "mask": torch.tensor(mask)}


def check_sizes(**sizes: int) -> None:
    """Raise a `UserError` if a size is below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"{name} = {value}; expected at least 1.")


def describe_chat(sample: Any, tokenizer: ChatTokenizer, *, in_color: bool) -> str:
    """Return the rendered text of a sample with its mask, for people to check."""
    chat = tokenizer(read_conversation(sample))
    return mark_spans(chat.text, chat.spans, in_color=in_color)
