"""Stream of preference pairs: a chosen and a rejected answer, which packing keeps in one row."""

from typing import Any, final

from pydantic import JsonValue

from d9d_loop.data.chat_tokenizer import ChatTokenizer
from d9d_loop.data.conversation import TooLong, read_pair
from d9d_loop.data.conversation_stream import ConversationStream, MaskedTokens, to_document
from d9d_loop.data.document import Pair
from d9d_loop.data.sample_stream import SampleStream


@final
class PairStream(ConversationStream):
    """Preference pairs of conversations. Pack them with `PackedStream`.

    Packing keeps a pair together: documents 2p and 2p + 1 of a row are the chosen and the rejected conversation of
    pair p. So both are always in one microbatch on one data-parallel rank. An entry is two tuples of tokens and mask.

    Args:
        stream: Stream of samples in a form that `read_pair` accepts.
        tokenizer: Renders and tokenizes conversations, and verifies their masks.
        max_length: Maximum length of a pair, in positions of both conversations together. For packing, the row length.
        too_long: `refuse` longer pairs with an error, `drop` them, or `truncate` their ends: each conversation
            may fill at least half of `max_length`.
        with_last_token: If True, the last token is also an input, with the label -100. Reward models score it.
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

    def read(self, entry: tuple[MaskedTokens, MaskedTokens]) -> Pair:
        """Return both documents of a pair."""
        chosen, rejected = map(to_document, entry)
        return {"chosen": chosen, "rejected": rejected}

    def length(self, entry: tuple[MaskedTokens, MaskedTokens]) -> int:
        """Return the number of positions of both documents."""
        return sum(len(tokens) - 1 for tokens, _ in entry)

    def identity(self) -> JsonValue:
        """Return the digest of the tokenizer, the options, and the identity of the samples."""
        return {"pairs": {**self._options(), "with_last_token": self._with_last_token}}

    def tokenize(self, sample: Any) -> tuple[MaskedTokens, MaskedTokens] | None:
        """Return tokens and masks of both conversations; None if the pair is dropped."""
        chats = [self._tokenizer(each) for each in read_pair(sample)]
        extra = int(self._with_last_token)
        # A conversation may use the positions that the other one leaves, and at least half of the pair's length.
        shorter = min(len(chat.tokens) - 1 + extra for chat in chats)
        length = max(self._max_length - shorter, self._max_length // 2) - extra
        chosen, rejected = (self._fit(chat, length) for chat in chats)
        return None if chosen is None or rejected is None else (self._extend(chosen), self._extend(rejected))

    def _extend(self, chat: MaskedTokens) -> MaskedTokens:
        tokens, mask = chat
        return ([*tokens, tokens[-1]], [*mask, False]) if self._with_last_token else chat
