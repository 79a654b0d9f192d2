"""Data providers of conversations and preference pairs in files, for scripts and presets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

from d9d_dist.errors import check_choice
from d9d_loop.data.chat_stream import ChatStream, PairStream
from d9d_loop.data.chat_tokenizer import ChatTokenizer, read_chat_tokenizer
from d9d_loop.data.conversation import TooLong
from d9d_loop.data.data_provider import check_samples
from d9d_loop.data.indexed_stream import IndexedStream
from d9d_loop.data.packed_provider import PackedProvider
from d9d_loop.data.packed_stream import PackedStream
from d9d_loop.data.sample_files import open_samples
from d9d_loop.data.sample_stream import Samples, SampleStream

Files = Path | str | Sequence[Path | str]
"""One or several paths."""


ChatKind: TypeAlias = Literal["chats", "pairs", "scored_pairs"]
"""Kind of the samples."""


@final
class ChatData(PackedProvider):
    """Packed conversations, or preference pairs, from files or from map-style datasets.

        ChatData("chats.jsonl", tokenizer="Qwen3-0.6B", row_length=2048)

    Args:
        train: Files of the training data in a format of `open_samples`, such as `.jsonl`, or a map-style dataset of
            samples, such as a Hugging Face dataset.
        tokenizer: Folder of a model with its tokenizer and chat template, or a `ChatTokenizer`.
        row_length: Length of the packed rows, and so of the longest conversation, in positions.
        held_out: Files of the evaluation data, or a map-style dataset; None for no evaluation.
        kind: `chats`, `pairs`, or `scored_pairs` for reward models; see `ChatStream` and `PairStream`.
        too_long: Treatment of longer conversations; see `ChatStream`.
        window: Number of conversations packed together. Larger windows leave less padding and take longer at the start.
        shuffle: If False, read each epoch in order; the rows of a window are shuffled nevertheless.
        epochs: Number of epochs; `None` repeats them without end.

    Raises:
        UserError: If a file is missing, the folder has no chat template, the row length is too small, or an option is
            unknown.
    """

    def __init__(
        self,
        train: Files | Samples,
        *,
        tokenizer: str | Path | ChatTokenizer,
        row_length: int,
        held_out: Files | Samples | None = None,
        kind: ChatKind = "chats",
        too_long: TooLong = "refuse",
        window: int = 1024,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        check_choice("kind", kind, ChatKind)
        evaluation = None if held_out is None else _samples(held_out, "held_out")
        super().__init__(_samples(train, "train"), evaluation, shuffle=shuffle, epochs=epochs)
        self._tokenizer = tokenizer if isinstance(tokenizer, ChatTokenizer) else read_chat_tokenizer(tokenizer)
        self._kind, self._row_length, self._window = kind, row_length, window
        self._too_long: TooLong = too_long

    def _rows(self, samples: Samples, *, seed: int, **options: Any) -> SampleStream:
        stream = IndexedStream(samples, seed=seed, **options)
        length, tokenizer, too_long = self._row_length, self._tokenizer, self._too_long
        chats: SampleStream
        if self._kind == "chats":
            chats = ChatStream(stream, tokenizer, max_length=length, too_long=too_long)
        else:
            scored = self._kind == "scored_pairs"
            chats = PairStream(stream, tokenizer, max_length=length, too_long=too_long, with_last_token=scored)
        return PackedStream(chats, row_length=length, window=self._window, seed=seed)


def _samples(source: Files | Samples, argument: str) -> Samples:
    if isinstance(source, Path | str):
        return open_samples([Path(source)], key=argument)
    if isinstance(source, Sequence) and all(isinstance(each, Path | str) for each in source):
        return open_samples([Path(each) for each in source], key=argument)
    check_samples(source, argument)
    return source
