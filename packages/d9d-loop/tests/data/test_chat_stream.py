from pathlib import Path
from typing import Any

import pytest
import torch
from chat_examples import byte_tokenizer, chat, chat_tokenizer, chats
from example_streams import assert_resumes_anywhere

from d9d_dist import UserError
from d9d_loop.data import (
    ChatStream,
    DocumentStream,
    IndexedStream,
    MixtureStream,
    PackedStream,
    PairStream,
    TokenFile,
    TokenWindows,
    TooLong,
    read_conversation,
    tokenize_chats,
)

pytest.importorskip("jinja2", reason="needs the extra chat")
pytest.importorskip("tokenizers", reason="needs the extra chat")


SAMPLES = chats(23)
LONGEST = 400


def _stream(**options: Any) -> ChatStream:
    given: dict[str, Any] = {"max_length": LONGEST, "window": 5} | options
    samples = IndexedStream(SAMPLES, seed=0, epochs=given.pop("epochs", None))
    return ChatStream(samples, chat_tokenizer(), **given)


def _trained(row: dict[str, torch.Tensor]) -> str:
    labels = row["labels"]
    return byte_tokenizer("<|im_start|>", "<|im_end|>").decode(labels[labels >= 0].tolist(), skip_special_tokens=False)


def test_a_chat_stream_resumes_at_any_entry() -> None:
    assert_resumes_anywhere(_stream(), 30)
    assert_resumes_anywhere(PackedStream(_stream(), row_length=LONGEST, window=7, seed=1), 15)


def test_the_labels_of_an_epoch_contain_each_answer_once() -> None:
    packed = PackedStream(_stream(epochs=1), row_length=LONGEST, window=8, seed=1)
    rows = [packed.read(entry) for entry in packed.cursor().take(1000)]
    found = "".join(map(_trained, rows)).split("<|im_end|>")
    assert sorted(found[:-1]) == sorted(each["messages"][1]["content"] for each in SAMPLES)
    assert not packed.is_endless


def test_in_a_mixture_with_text_only_labels_of_chats_are_masked(tmp_path: Path) -> None:
    from d9d_loop.data import TokenizedStream  # noqa: PLC0415

    text = TokenizedStream(IndexedStream(["plain text"], seed=0), lambda text: list(text.encode()), max_length=LONGEST)
    mixture = MixtureStream({"chat": _stream(), "text": text}, weights={"chat": 1, "text": 1}, seed=0)
    packed = PackedStream(mixture, row_length=LONGEST, window=8, seed=1)
    row = packed.read(packed.cursor().take(1)[0])
    for source, is_masked in ((0, True), (1, False)):
        assert (row["labels"][row["sources"] == source] == -100).any() == is_masked


def test_a_token_file_gives_the_same_rows(tmp_path: Path) -> None:
    file = tokenize_chats(SAMPLES, tmp_path / "chats", tokenizer=chat_tokenizer())
    assert file.has_masks
    file.verify()
    stored = DocumentStream(file, max_length=LONGEST, seed=0)
    for one, other in zip(_stream().cursor().take(30), stored.cursor().take(30), strict=True):
        first, second = _stream().read(one), stored.read(other)
        assert torch.equal(first["tokens"], second["tokens"])
        assert torch.equal(first["mask"], second["mask"])
    rows = PackedStream(stored, row_length=LONGEST, seed=0)
    row = rows.read(rows.cursor().take(1)[0])
    assert (row["labels"] == -100).sum() > 50
    with pytest.raises(UserError, match="the token file has loss masks, which TokenWindows would ignore"):
        TokenWindows(file, length=8)
    assert TokenFile(tmp_path / "chats").manifest.about["dropped"] == 0


@pytest.mark.parametrize(("too_long", "count"), [("drop", 1), ("truncate", 2)])
def test_long_conversations_are_truncated_or_dropped(too_long: TooLong, count: int) -> None:
    samples = IndexedStream([chat("a", "b" * 300), chat("a", "b"), chat("a" * 300, "b")], seed=0, epochs=1)
    stream = ChatStream(samples, chat_tokenizer(), max_length=100, too_long=too_long)
    entries = stream.cursor().take(10)
    assert len(entries) == count  # a conversation without labels after truncation is dropped
    assert max(map(stream.length, entries)) == (100 if count == 2 else min(map(stream.length, entries)))


def test_long_conversations_are_refused_by_default() -> None:
    with pytest.raises(UserError, match=r"a conversation has \d+ positions; expected at most max_length = 20"):
        _stream(max_length=20).cursor().take(1)


def test_the_identity_of_a_chat_stream_depends_on_its_options() -> None:
    assert _stream().identity() == _stream().identity()
    assert len({str(_stream(**options).identity()) for options in ({}, {"window": 6}, {"too_long": "drop"})}) == 3


def test_the_identity_of_a_token_file_depends_on_its_masks(tmp_path: Path) -> None:
    def identity(name: str, **changes: Any) -> Any:
        file = tokenize_chats([{**chat("a", "b", "c", "d"), **changes}], tmp_path / name, tokenizer=chat_tokenizer())
        return DocumentStream(file, max_length=LONGEST, seed=0).identity()

    other = chat("a", "b", "c", "d")
    other["messages"][1]["weight"] = 0
    assert identity("one") == identity("same") != identity("other", **other)


def test_the_error_has_the_index_of_an_invalid_conversation(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="conversation 1: a sample has the keys text"):
        tokenize_chats([SAMPLES[0], {"text": "a"}], tmp_path / "chats", tokenizer=chat_tokenizer())


def test_a_packed_row_has_the_tokens_and_masked_labels_of_the_conversation() -> None:
    tokens = chat_tokenizer()(read_conversation(SAMPLES[0]))
    packed = PackedStream(
        ChatStream(IndexedStream(SAMPLES[:1], seed=0), chat_tokenizer(), max_length=LONGEST),
        row_length=LONGEST, window=1, seed=0,
    )  # fmt: skip
    row = packed.read(packed.cursor().take(1)[0])
    length = len(tokens.tokens) - 1
    assert row["input_ids"][:length].tolist() == tokens.tokens[:-1]
    expected = [t if m else -100 for t, m in zip(tokens.tokens, tokens.mask, strict=True)][1:]
    assert row["labels"][:length].tolist() == expected


pytest.importorskip("jinja2", reason="needs the extra chat")
pytest.importorskip("tokenizers", reason="needs the extra chat")


PAIRS = [
    {"prompt": f"ask {n}", "chosen": f"good {n} " * (1 + n % 4), "rejected": f"bad {n} " * (1 + n % 3)}
    for n in range(17)
]


def _pairs(**options: Any) -> PairStream:
    given: dict[str, Any] = {"max_length": 256, "window": 5} | options
    samples = IndexedStream(PAIRS, seed=0, epochs=given.pop("epochs", None))
    return PairStream(samples, chat_tokenizer(), **given)


def _documents(row: dict[str, torch.Tensor]) -> list[str]:
    """Return the text of the labels of each document of a row."""
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    kept = [row["labels"][(row["documents"] == n) & (row["labels"] >= 0)] for n in range(int(row["documents"].max()))]
    return [tokenizer.decode(each.tolist()) for each in kept]


def test_a_pair_stream_resumes_at_any_entry() -> None:
    assert_resumes_anywhere(_pairs(), 25)
    assert_resumes_anywhere(PackedStream(_pairs(), row_length=256, window=7, seed=1), 15)


def test_chosen_and_rejected_are_adjacent_documents_of_a_row() -> None:
    packed = PackedStream(_pairs(epochs=1), row_length=512, window=10, seed=1)
    rows = [packed.read(entry) for entry in packed.cursor().take(1000)]
    found = [text for row in rows for text in _documents(row)]
    pairs = list(zip(found[0::2], found[1::2], strict=True))
    assert sorted(pairs) == sorted((each["chosen"], each["rejected"]) for each in PAIRS)
    assert len(rows) < len(PAIRS)


def test_pairs_know_their_source_in_a_mixture() -> None:
    mixture = MixtureStream({"one": _pairs(), "other": _stream()}, weights={"one": 1, "other": 1}, seed=0)
    packed = PackedStream(mixture, row_length=1024, window=8, seed=1)
    row = packed.read(packed.cursor().take(1)[0])
    num_sources = [len(set(row["sources"][row["documents"] // 2 == p].tolist())) for p in range(2)]
    assert num_sources == [1, 1]
    assert set(row["sources"].tolist()) >= {0, 1}


def test_with_last_token_the_stop_token_is_an_input_without_a_label() -> None:
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    packed = PackedStream(_pairs(with_last_token=True), row_length=256, window=1, seed=1)
    row = packed.read(packed.cursor().take(1)[0])
    for document in (0, 1):
        is_own = row["documents"] == document
        assert row["input_ids"][is_own][-1] == tokenizer.token_to_id("<|im_end|>")
        assert row["labels"][is_own][-1] == -100


def test_scored_pairs_have_their_margins() -> None:
    samples = [{**pair, "margin": number + 0.5} for number, pair in enumerate(PAIRS[:3])]
    del samples[1]["margin"]
    stream = IndexedStream(samples, seed=0, shuffle=False, epochs=1)
    pairs = PairStream(stream, chat_tokenizer(), max_length=256, with_last_token=True)
    packed = PackedStream(pairs, row_length=256, window=3, seed=1)
    margins = {0.5: 0, 0.0: 0, 2.5: 0}
    for row in map(packed.read, packed.cursor().take(10)):
        for document in range(2 * int(row["documents"].max() // 2)):
            (margin,) = set(row["margins"][row["documents"] == document].tolist())
            margins[margin] += 1
        assert not row["margins"][row["documents"] == row["documents"].max()].any()
    assert margins == {0.5: 2, 0.0: 2, 2.5: 2}
    without = PairStream(stream, chat_tokenizer(), max_length=256)
    assert "margin" not in without.read(without.cursor().take(1)[0])


def test_long_pairs_are_refused_dropped_or_truncated() -> None:
    with pytest.raises(UserError, match=r"a conversation has \d+ positions; expected at most max_length"):
        _pairs(max_length=80).cursor().take(1)
    dropped = _pairs(max_length=85, too_long="drop", epochs=1).cursor().take(100)
    truncated = _pairs(max_length=85, too_long="truncate", epochs=1)
    entries = truncated.cursor().take(100)
    assert 0 < len(dropped) < len(entries) == len(PAIRS)
    assert max(map(truncated.length, entries)) <= 85
