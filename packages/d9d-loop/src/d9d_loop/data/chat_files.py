"""Token files of conversations with loss masks, written once for many jobs. The command is `d9d-tokenize --chat`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_loop.data.chat_tokenizer import ChatTokenizer
from d9d_loop.data.conversation import TooLong, read_conversation
from d9d_loop.data.conversation_stream import fit_tokens
from d9d_loop.data.token_file import TokenFile
from d9d_loop.data.token_file_writer import TokenFileWriter


def tokenize_chats(
    samples: Iterable[Mapping[str, Any]],
    folder: str | Path,
    *,
    tokenizer: ChatTokenizer,
    max_length: int | None = None,
    too_long: TooLong = "refuse",
) -> TokenFile:
    """Tokenize conversations, write them to a token file with masks, and open it.

    Read the file with a `DocumentStream` whose own `max_length` is at least as large. A smaller one splits
    conversations, and their later parts lack the earlier messages.

    Args:
        samples: Samples in a form that `read_conversation` accepts.
        folder: Folder to write; must not exist.
        tokenizer: Renders and tokenizes conversations, and verifies their masks.
        max_length: Maximum length of a conversation, in positions; None for no limit.
        too_long: Treatment of longer conversations; see `ChatStream`.

    Raises:
        UserError: If a conversation is invalid or too long; the message has its index. Also if the folder exists,
            or no conversation is left.
    """
    about: dict[str, JsonValue] = {"tokenizer_sha256": tokenizer.identity(), "max_length": max_length}
    dropped = 0
    with TokenFileWriter(folder, vocab_size=tokenizer.vocab_size, about=about, with_masks=True) as writer:
        for number, sample in enumerate(samples):
            try:
                chat = tokenizer(read_conversation(sample))
                fitted = fit_tokens(chat, max_length=max_length or len(chat.tokens), too_long=too_long)
            except UserError as error:
                raise UserError(f"conversation {number}: {error}") from None
            if fitted is None:
                dropped += 1
                continue
            tokens, mask = fitted
            writer.append(tokens, mask=mask)
        writer.describe(dropped=dropped)
    return TokenFile(folder)
