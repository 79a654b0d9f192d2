"""Stream of conversations as documents with a loss mask, tokenized while they are read."""

from typing import Any, final

from pydantic import JsonValue

from d9d_loop.data.chat_tokenizer import ChatTokenizer
from d9d_loop.data.conversation import read_conversation
from d9d_loop.data.conversation_stream import ConversationStream, MaskedTokens, to_document
from d9d_loop.data.document import Document
from d9d_loop.data.masked_text import mark_spans


@final
class ChatStream(ConversationStream):
    """Conversations as documents: only the assistant's turns contribute to the loss. Pack them with `PackedStream`.

    Every rank tokenizes every conversation, since their lengths determine the packing. If that is too slow, write a
    token file with `d9d-tokenize --chat` once, and read it with a `DocumentStream`. An entry is tokens and their mask.

    Args:
        stream: Stream of samples in a form that `read_conversation` accepts, such as an `IndexedStream` of `JsonLines`
            or of a Hugging Face dataset.
        tokenizer: Renders and tokenizes conversations, and verifies their masks.
        max_length: Maximum length of a conversation, in positions. For packing, the row length.
        too_long: `refuse` longer conversations with an error, `drop` them, or `truncate` them at the end. A
            conversation without labels after truncation is dropped.
        window: Number of conversations tokenized at a time. A job that resumes inside a window tokenizes it again.

    Raises:
        UserError: If `max_length` or `window` is below 1; when a conversation is read, if it is invalid or too long.
    """

    def read(self, entry: MaskedTokens) -> Document:
        """Return the tokens of a conversation and their mask."""
        return to_document(entry)

    def length(self, entry: MaskedTokens) -> int:
        """Return the number of positions of a conversation: its number of tokens minus one."""
        return len(entry[0]) - 1

    def identity(self) -> JsonValue:
        """Return the digest of the tokenizer, the sizes, and the identity of the conversations."""
        return {"chats": self._options()}

    def tokenize(self, sample: Any) -> MaskedTokens | None:
        """Return the tokens and the mask of a conversation; None if it is dropped."""
        tokens = self._tokenizer(read_conversation(sample))
        return self._fit(tokens, self._max_length)


def describe_chat(sample: Any, tokenizer: ChatTokenizer, *, in_color: bool) -> str:
    """Return the rendered text of a sample with its mask, for people to check."""
    chat = tokenizer(read_conversation(sample))
    return mark_spans(chat.text, chat.spans, in_color=in_color)
