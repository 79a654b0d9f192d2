from typing import Any

import pytest
import torch
from example_streams import assert_resumes_anywhere

pytest.importorskip("jinja2", reason="needs the extra chat")
pytest.importorskip("tokenizers", reason="needs the extra chat")

from chat_examples import byte_tokenizer, chat_tokenizer

from d9d_dist import UserError
from d9d_loop.data import IndexedStream, MixtureStream, PackedStream, PairStream

PAIRS = [
    {"prompt": f"ask {n}", "chosen": f"good {n} " * (1 + n % 4), "rejected": f"bad {n} " * (1 + n % 3)}
    for n in range(17)
]


def _stream(**options: Any) -> PairStream:
    given: dict[str, Any] = {"max_length": 256, "window": 5} | options
    samples = IndexedStream(PAIRS, seed=0, epochs=given.pop("epochs", None))
    return PairStream(samples, chat_tokenizer(), **given)


def _documents(row: dict[str, torch.Tensor]) -> list[str]:
    """Return the text of the labels of each document of a row."""
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    kept = [row["labels"][(row["documents"] == n) & (row["labels"] >= 0)] for n in range(int(row["documents"].max()))]
    return [tokenizer.decode(each.tolist()) for each in kept]


def test_a_pair_stream_resumes_at_any_entry() -> None:
    assert_resumes_anywhere(_stream(), 25)
    assert_resumes_anywhere(PackedStream(_stream(), row_length=256, window=7, seed=1), 15)


def test_chosen_and_rejected_are_adjacent_documents_of_a_row() -> None:
    packed = PackedStream(_stream(epochs=1), row_length=512, window=10, seed=1)
    rows = [packed.read(entry) for entry in packed.cursor().take(1000)]
    found = [text for row in rows for text in _documents(row)]
    pairs = list(zip(found[0::2], found[1::2], strict=True))
    assert sorted(pairs) == sorted((each["chosen"], each["rejected"]) for each in PAIRS)
    assert len(rows) < len(PAIRS)


def test_pairs_know_their_source_in_a_mixture() -> None:
    mixture = MixtureStream({"one": _stream(), "other": _stream()}, weights={"one": 1, "other": 1}, seed=0)
    packed = PackedStream(mixture, row_length=1024, window=8, seed=1)
    row = packed.read(packed.cursor().take(1)[0])
    num_sources = [len(set(row["sources"][row["documents"] // 2 == p].tolist())) for p in range(2)]
    assert num_sources == [1, 1]
    assert set(row["sources"].tolist()) >= {0, 1}


def test_with_last_token_the_stop_token_is_an_input_without_a_label() -> None:
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    packed = PackedStream(_stream(with_last_token=True), row_length=256, window=1, seed=1)
    row = packed.read(packed.cursor().take(1)[0])
    for document in (0, 1):
        is_own = row["documents"] == document
        assert row["input_ids"][is_own][-1] == tokenizer.token_to_id("<|im_end|>")
        assert row["labels"][is_own][-1] == -100


def test_long_pairs_are_refused_dropped_or_truncated() -> None:
    with pytest.raises(UserError, match=r"a conversation has \d+ positions; expected at most max_length"):
        _stream(max_length=80).cursor().take(1)
    dropped = _stream(max_length=85, too_long="drop", epochs=1).cursor().take(100)
    truncated = _stream(max_length=85, too_long="truncate", epochs=1)
    entries = truncated.cursor().take(100)
    assert 0 < len(dropped) < len(entries) == len(PAIRS)
    assert max(map(truncated.length, entries)) <= 85
