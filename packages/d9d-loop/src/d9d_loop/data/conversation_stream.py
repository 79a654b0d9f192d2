"""Streams that tokenize conversations while they are read, window by window."""

from abc import abstractmethod
from typing import Any

import torch
from pydantic import JsonValue

from d9d_dist import UserError
from d9d_loop.data.chat_tokenizer import ChatTokenizer, ChatTokens
from d9d_loop.data.conversation import TooLong
from d9d_loop.data.document import Document
from d9d_loop.data.masked_text import mark_spans
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream
from d9d_loop.data.window_cursor import WindowCursor

MaskedTokens = tuple[list[int], list[bool]]
"""Tokens of a document, and its loss mask: True for each token that contributes to the loss."""


class ConversationStream(SampleStream):
    """Stream whose entries are tokenized conversations. Base class of `ChatStream` and `PairStream`."""

    def __init__(
        self,
        stream: SampleStream,
        tokenizer: ChatTokenizer,
        *,
        max_length: int,
        too_long: TooLong = "refuse",
        window: int = 64,
        num_each: int = 1,
    ) -> None:
        """Check the sizes; `num_each` is the number of conversations in an entry, which share `max_length`."""
        for name, value in (("max_length", max_length // num_each), ("window", window)):
            if value < 1:
                raise UserError(f"{name} = {value}; expected at least 1.")
        self._stream, self._tokenizer, self._max_length = stream, tokenizer, max_length
        self._too_long: TooLong = too_long
        self._window, self.is_endless = window, stream.is_endless

    @abstractmethod
    def tokenize(self, sample: Any) -> Entry | None:
        """Return the entry of a sample; None if it is dropped."""

    def cursor(self, state: JsonValue = None) -> Cursor:
        """Return a cursor. If `state` points into a window, that window is tokenized again."""
        return WindowCursor(self._stream, state, size=self._window, arrange=self._arrange)

    def _arrange(self, entries: list[Entry], _window: int) -> list[Entry]:
        tokenized = (self.tokenize(self._stream.read(entry)) for entry in entries)
        return [each for each in tokenized if each is not None]

    def _fit(self, chat: ChatTokens, max_length: int) -> MaskedTokens | None:
        return fit_tokens(chat, max_length=max_length, too_long=self._too_long)

    def _options(self) -> dict[str, JsonValue]:
        """Return the digest of the tokenizer, the options, and the identity of the samples."""
        options: dict[str, JsonValue] = {"max_length": self._max_length, "too_long": self._too_long}
        of: dict[str, JsonValue] = {"tokenizer": self._tokenizer.identity(), "of": self._stream.identity()}
        return {**options, "window": self._window, **of}


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
