"""Conversations and preference pairs as documents with a loss mask: streams that tokenize them, and token files.

Every rank tokenizes every conversation of a stream, since their lengths determine the packing. If that is too slow,
write a token file with `tokenize_chats` or `d9d-tokenize --chat` once, and read it with a `DocumentStream`.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from pydantic import JsonValue

from d9d_dist import UserError
from d9d_dist.errors import check_choice
from d9d_loop.data.chat_tokenizer import ChatTokenizer, ChatTokens
from d9d_loop.data.conversation import TooLong, read_conversation, read_margin, read_pair
from d9d_loop.data.document import Document, Pair
from d9d_loop.data.sample_stream import Entry, SampleStream
from d9d_loop.data.token_file import TokenFile
from d9d_loop.data.token_file_writer import TokenFileWriter
from d9d_loop.data.windowed_stream import WindowedStream

MaskedTokens = tuple[list[int], list[bool]]
"""Tokens of a document, and its loss mask: True for each token that contributes to the loss."""


class _ConversationStream(WindowedStream):
    """Stream whose entries are tokenized conversations. Base class of `ChatStream` and `PairStream`.

    `num_each` is the number of conversations in an entry, which share `max_length`.
    """

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
        for name, value in (("max_length", max_length // num_each), ("window", window)):
            if value < 1:
                raise UserError(f"{name} = {value}; expected at least 1.")
        check_choice("too_long", too_long, TooLong)
        super().__init__(stream, size=window)
        self._tokenizer, self._max_length = tokenizer, max_length
        self._too_long: TooLong = too_long

    @abstractmethod
    def _tokenize(self, sample: Any) -> Entry | None:
        """Return the entry of a sample; None if it is dropped."""

    def _arrange(self, entries: list[Entry], window: int) -> list[Entry]:
        tokenized = (self._tokenize(self._stream.read(entry)) for entry in entries)
        return [each for each in tokenized if each is not None]

    def _fit(self, chat: ChatTokens, max_length: int) -> MaskedTokens | None:
        return fit_tokens(chat, max_length=max_length, too_long=self._too_long)

    def _options(self) -> dict[str, JsonValue]:
        """Return the digest of the tokenizer, the options, and the identity of the samples."""
        options: dict[str, JsonValue] = {"max_length": self._max_length, "too_long": self._too_long}
        of: dict[str, JsonValue] = {"tokenizer": self._tokenizer.identity(), "of": self._stream.identity()}
        return {**options, "window": self._size, **of}


@final
class ChatStream(_ConversationStream):
    """Conversations as documents: only the assistant's turns contribute to the loss. Pack them with `PackedStream`.

    An entry is tokens and their mask.

    Args:
        stream: Stream of samples in a form that `read_conversation` accepts, such as an `IndexedStream` of `JsonLines`
            or of a Hugging Face dataset.
        max_length: Maximum length of a conversation, in positions. For packing, the row length.
        too_long: `refuse` longer conversations with an error, `drop` them, or `truncate` them at the end. A
            conversation without labels after truncation is dropped.
        window: Number of conversations tokenized at a time. A job that resumes inside a window tokenizes it again.

    Raises:
        UserError: If `max_length` or `window` is below 1; when a conversation is read, if it is invalid or too long.
    """

    def read(self, entry: MaskedTokens) -> Document:
        """Return the tokens of a conversation and their mask."""
        return _document(entry)

    def length(self, entry: MaskedTokens) -> int:
        """Return the number of positions of a conversation: its number of tokens minus one."""
        return len(entry[0]) - 1

    def identity(self) -> JsonValue:
        """Return the digest of the tokenizer, the sizes, and the identity of the conversations."""
        return {"chats": self._options()}

    def _tokenize(self, sample: Any) -> MaskedTokens | None:
        return self._fit(self._tokenizer(read_conversation(sample)), self._max_length)


@final
class PairStream(_ConversationStream):
    """Preference pairs of conversations. Pack them with `PackedStream`.

    Packing keeps a pair together: documents 2p and 2p + 1 of a row are the chosen and the rejected conversation of
    pair p. So both are always in one microbatch on one data-parallel rank. An entry is two tuples of tokens and mask,
    and the margin of the pair.

    Args:
        stream: Stream of samples in a form that `read_pair` accepts.
        max_length: Maximum length of a pair, in positions of both conversations together. For packing, the row length.
        too_long: `refuse` longer pairs with an error, `drop` them, or `truncate` their ends: each conversation
            may fill at least half of `max_length`.
        with_last_token: If True, the last token is also an input, with the label -100, which reward models score, and
            the pair has its `margin`; see `read_margin`.
        window: Number of pairs tokenized at a time. A job that resumes inside a window tokenizes it again.

    Raises:
        UserError: If `max_length` is below 2 or `window` below 1; when a pair is read, if it is invalid or too long.
    """

    def __init__(
        self,
        stream: SampleStream,
        tokenizer: ChatTokenizer,
        *,
        max_length: int,
        too_long: TooLong = "refuse",
        with_last_token: bool = False,
        window: int = 64,
    ) -> None:
        super().__init__(stream, tokenizer, max_length=max_length, too_long=too_long, window=window, num_each=2)
        self._with_last_token = with_last_token

    def read(self, entry: tuple[MaskedTokens, MaskedTokens, float]) -> Pair:
        """Return both documents of a pair."""
        pair: Pair = {"chosen": _document(entry[0]), "rejected": _document(entry[1])}
        return {**pair, "margin": entry[2]} if self._with_last_token else pair

    def length(self, entry: tuple[MaskedTokens, MaskedTokens, float]) -> int:
        """Return the number of positions of both documents."""
        return sum(len(tokens) - 1 for tokens, _ in entry[:2])

    def identity(self) -> JsonValue:
        """Return the digest of the tokenizer, the options, and the identity of the samples."""
        return {"pairs": {**self._options(), "with_last_token": self._with_last_token}}

    def _tokenize(self, sample: Any) -> tuple[MaskedTokens, MaskedTokens, float] | None:
        chats = [self._tokenizer(each) for each in read_pair(sample)]
        extra = int(self._with_last_token)
        # A conversation may use the positions that the other one leaves, and at least half of the pair's length.
        shorter = min(len(chat.tokens) - 1 + extra for chat in chats)
        length = max(self._max_length - shorter, self._max_length // 2) - extra
        chosen, rejected = (self._fit(chat, length) for chat in chats)
        if chosen is None or rejected is None:
            return None
        return self._extend(chosen), self._extend(rejected), read_margin(sample) if self._with_last_token else 0.0

    def _extend(self, chat: MaskedTokens) -> MaskedTokens:
        tokens, mask = chat
        return ([*tokens, tokens[-1]], [*mask, False]) if self._with_last_token else chat


def tokenize_chats(
    samples: Iterable[Mapping[str, Any]],
    folder: str | Path,
    *,
    tokenizer: ChatTokenizer,
    max_length: int | None = None,
    too_long: TooLong = "refuse",
    pairs: bool = False,
) -> TokenFile:
    """Tokenize conversations, write them to a token file with masks, and open it.

    Read the file with a `DocumentStream` whose own `max_length` is at least as large. A smaller one splits
    conversations, and their later parts lack the earlier messages.

    Samples are in a form that `read_conversation` accepts, or `read_pair` if they are `pairs`: documents 2p and 2p + 1
    are then the chosen and the rejected conversation of a pair, which are dropped together. `max_length` is the maximum
    length of a conversation in positions, None for no limit; for `too_long`, see `ChatStream`. The manifest counts
    samples: all (`read`), those without a label within `max_length` (`dropped`), and those that lose their end to it
    (`cut`). If a pair has a margin, see `read_margin`, it has those of all pairs (`margins`).

    Raises:
        UserError: If a conversation is invalid or too long; the message has its index. Also if the folder exists,
            or no conversation is left.
    """
    check_choice("too_long", too_long, TooLong)
    about: dict[str, JsonValue] = {"chat_identity": tokenizer.identity(), "max_length": max_length}
    about["tokenizer_identity"] = tokenizer.text_tokenizer.identity()
    what = "pair" if pairs else "conversation"
    counts = dict.fromkeys(("read", "dropped", "cut"), 0)
    margins: list[JsonValue] = []
    with TokenFileWriter(folder, vocab_size=tokenizer.vocab_size, about=about, with_masks=True) as writer:
        for number, sample in enumerate(samples):
            try:
                chats = [tokenizer(each) for each in (read_pair(sample) if pairs else (read_conversation(sample),))]
                margin = read_margin(sample) if pairs else 0.0
                limits = (max_length or len(chat.tokens) for chat in chats)
                fitted = [
                    fit_tokens(chat, max_length=limit, too_long=too_long)
                    for chat, limit in zip(chats, limits, strict=True)
                ]
            except UserError as error:
                raise UserError(f"{what} {number}: {error}") from None
            counts["read"] += 1
            kept = [each for each in fitted if each is not None]
            if len(kept) < len(chats):
                counts["dropped"] += 1
                continue
            counts["cut"] += any(len(each[0]) < len(chat.tokens) for each, chat in zip(kept, chats, strict=True))
            margins.append(margin)
            for tokens, mask in kept:
                writer.append(tokens, mask=mask)
        if max_length is not None and counts["read"] == counts["dropped"] > 0:
            raise UserError(
                f"all {counts['read']} {what}s are dropped: none has a label within its first {max_length + 1} "
                "tokens, because the prompts are longer or too_long = drop; expected answers within that length. "
                "Increase the length."
            )
        writer.describe(**counts, **({"margins": margins} if any(margins) else {}))
    return TokenFile(folder)


def fit_tokens(chat: ChatTokens, *, max_length: int, too_long: TooLong) -> MaskedTokens | None:
    """Return the tokens and mask of a conversation of at most `max_length` positions; None if it is dropped.

    A conversation that is too long raises `UserError` if `too_long` is `refuse`.
    """
    if len(chat.tokens) - 1 <= max_length:
        return chat.tokens, chat.mask
    if too_long == "refuse":
        raise UserError(
            f"a conversation has {len(chat.tokens) - 1} positions; expected at most max_length = {max_length}, which "
            f"is {max_length + 1} tokens. Set too_long to 'drop' or 'truncate', or increase the length. The "
            "conversation starts with:\n"
            f"{chat.text[:400]}"
        )
    tokens, mask = chat.tokens[: max_length + 1], chat.mask[: max_length + 1]
    return (tokens, mask) if too_long == "truncate" and any(mask[1:]) else None


def _document(chat: MaskedTokens) -> Document:
    tokens, mask = chat
    return {"tokens": torch.tensor(tokens), "mask": torch.tensor(mask)}
