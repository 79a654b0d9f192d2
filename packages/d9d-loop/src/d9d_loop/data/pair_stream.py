"""Stream of preference pairs: a chosen and a rejected answer, which packing keeps in one row."""

from typing import final

from pydantic import JsonValue

from d9d_loop.data.chat_stream import MaskedTokens, TooLong, check_sizes, fit_tokens, to_document
from d9d_loop.data.chat_tokenizer import ChatTokenizer
from d9d_loop.data.conversation import read_pair
from d9d_loop.data.document import Pair
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream
from d9d_loop.data.window_cursor import WindowCursor


@final
class PairStream(SampleStream):
    """Preference pairs of conversations. Pack them with `PackedStream`.

    Packing places a pair as a whole: documents 2p and 2p + 1 of a row are the chosen and the rejected conversation of
    pair p. So both are always in one microbatch on one data-parallel rank. An entry is two tuples of tokens and mask.

    Args:
        stream: Stream of samples in a form that `read_pair` accepts.
        tokenizer: Renders and tokenizes conversations, and verifies their masks.
        max_length: Largest number of positions of a pair, both conversations together. For packing, the row length.
        too_long: `refuse` longer pairs with an error, `drop` them, or `truncate` their ends: each conversation
            keeps at least half the length.
        with_last_token: If True, the last token is an input too, with an ignored label. Reward models score it.
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
        check_sizes(max_length=max_length // 2, window=window)
        self._stream, self._tokenizer, self._max_length = stream, tokenizer, max_length
        self._too_long: TooLong = too_long
        self._with_last_token, self._window = with_last_token, window
        self.is_endless = stream.is_endless

    def cursor(self, state: JsonValue = None) -> Cursor:
        """Return a cursor. If `state` points into a window, that window is tokenized again."""
        return WindowCursor(self._stream, state, size=self._window, arrange=self._arrange)

    def read(self, entry: tuple[MaskedTokens, MaskedTokens]) -> Pair:
        """Return both documents of a pair."""
        chosen, rejected = map(to_document, entry)
        return {"chosen": chosen, "rejected": rejected}

    def length(self, entry: tuple[MaskedTokens, MaskedTokens]) -> int:
        """Return the number of positions of both documents."""
        return sum(len(tokens) - 1 for tokens, _ in entry)

    def identity(self) -> JsonValue:
        """Return the digest of the tokenizer, the options, and the identity of the samples."""
        options: dict[str, JsonValue] = {"max_length": self._max_length, "too_long": self._too_long}
        more: dict[str, JsonValue] = {"with_last_token": self._with_last_token, "window": self._window}
        of: dict[str, JsonValue] = {"tokenizer": self._tokenizer.identity(), "of": self._stream.identity()}
        return {"pairs": {**options, **more, **of}}

    def _arrange(self, entries: list[Entry], _window: int) -> list[tuple[MaskedTokens, MaskedTokens]]:
        pairs: list[tuple[MaskedTokens, MaskedTokens]] = []
        for entry in entries:
            chats = [self._tokenizer(each) for each in read_pair(self._stream.read(entry))]
            extra = int(self._with_last_token)
            # Each may use what the other leaves of the pair's length, and at least half of it.
            shorter = min(len(chat.tokens) - 1 + extra for chat in chats)
            length = max(self._max_length - shorter, self._max_length // 2) - extra
            chosen, rejected = (fit_tokens(chat, max_length=length, too_long=self._too_long) for chat in chats)
            if chosen is not None and rejected is not None:
                pairs.append((self._extend(chosen), self._extend(rejected)))
        return pairs

    def _extend(self, chat: MaskedTokens) -> MaskedTokens:
        tokens, mask = chat
        return ([*tokens, tokens[-1]], [*mask, False]) if self._with_last_token else chat
