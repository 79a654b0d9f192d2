from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from d9d_dist import UserError
from d9d_loop.data import cached_token_file

TEXTS = [b"one", b"", b"another"]


def test_bytes_are_tokens_and_empty_documents_are_dropped(tmp_path: Path) -> None:
    file = cached_token_file(TEXTS, tmp_path)
    assert [bytes(file[index]["tokens"].tolist()) for index in range(len(file))] == [b"one", b"another"]
    file.verify()


def test_a_tokenizer_may_return_a_tensor(tmp_path: Path) -> None:
    file = cached_token_file([b"\0", b"ab"], tmp_path, tokenize=lambda text: torch.tensor(list(text)), name="org/bytes")
    assert [sample["tokens"].tolist() for sample in map(file.__getitem__, range(len(file)))] == [[0], [97, 98]]
    assert [path.parent for path in tmp_path.iterdir()] == [tmp_path]
    assert len(list(tmp_path.glob("org-bytes-*"))) == 1


def test_an_existing_file_is_reused(tmp_path: Path) -> None:
    asked: list[bytes] = []

    def words(text: bytes) -> list[int]:
        asked.append(text)
        return [len(word) for word in text.split()]

    for _ in range(2):
        file = cached_token_file([b"to be or not"], tmp_path, tokenize=words, name="words", vocab_size=8)
        assert file[0]["tokens"].tolist() == [2, 2, 2, 3]
    assert asked == [b"to be or not"]
    assert file.manifest.about == {"tokenizer": "words"}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "other",
    [{"documents": [b"on", b"e", b"another"]}, {"documents": TEXTS[:2]}, {"name": "octets"}, {"vocab_size": 257}],
    ids=["cut elsewhere", "fewer", "tokenized otherwise", "another vocabulary"],
)
def test_other_documents_or_options_are_cached_in_another_file(tmp_path: Path, other: dict[str, Any]) -> None:
    cached_token_file(TEXTS, tmp_path)
    arguments: dict[str, Any] = {"documents": TEXTS, "cache": tmp_path, **other}
    cached_token_file(**arguments)
    assert len(list(tmp_path.iterdir())) == 2


def test_concurrent_ranks_get_one_file(tmp_path: Path) -> None:
    all_write = Barrier(3, timeout=30)

    def together(text: bytes) -> list[int]:
        all_write.wait()
        return list(text)

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(cached_token_file, TEXTS, tmp_path, tokenize=together) for _ in range(3)]
        files = [each.result() for each in asked]
    assert [bytes(file[1]["tokens"].tolist()) for file in files] == [b"another"] * 3
    assert [path.name.startswith("bytes-") for path in tmp_path.iterdir()] == [True]


def test_failed_writes_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no documents were written; expected at least one"):
        cached_token_file([b"", b""], tmp_path)
    with pytest.raises(UserError, match="document 0 has the tokens 101 to 111; expected 0 to 99"):
        cached_token_file(TEXTS, tmp_path, vocab_size=100)
    assert list(tmp_path.iterdir()) == []
