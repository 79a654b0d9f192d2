import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from example_streams import numbered_documents, write_tokens
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_loop.data import TokenFile, TokenFileWriter

DOCUMENTS = [[5, 6, 7], [8], [9, 10]]


@given(
    documents=st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9), min_size=1, max_size=9),
    as_tensor=st.booleans(),
)
def test_written_tokens_are_read_back(
    documents: list[list[int]], *, as_tensor: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    vocab_size = 1 + max(token for tokens in documents for token in tokens)
    folder = tmp_path_factory.mktemp("tokens") / "file"
    with TokenFileWriter(folder, vocab_size=vocab_size) as writer:
        for tokens in documents:
            writer.append(torch.tensor(tokens) if as_tensor else tokens)
    file = TokenFile(folder)
    assert [file[number]["tokens"].tolist() for number in range(len(file))] == documents
    assert file.manifest.dtype == ("uint16" if vocab_size <= 2**16 else "uint32")
    everything = [token for tokens in documents for token in tokens]
    assert file.tokens(0, file.manifest.num_tokens).tolist() == everything
    assert file.tokens(1, 1).tolist() == []
    file.verify()


def test_the_largest_tokens_of_two_bytes(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens", [[65535, 0, 32768]], vocab_size=65536)
    assert file.manifest.dtype == "uint16"
    assert file[0]["tokens"].tolist() == [65535, 0, 32768]
    assert file[0]["tokens"].dtype == torch.int64


def test_bytes_can_be_written_as_tokens(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "tokens", vocab_size=256) as writer:
        writer.append(b"tokens\xff")
    assert bytes(TokenFile(tmp_path / "tokens")[0]["tokens"].tolist()) == b"tokens\xff"


def test_a_token_file_can_be_pickled_for_other_processes(tmp_path: Path) -> None:
    file = pickle.loads(pickle.dumps(write_tokens(tmp_path / "tokens", DOCUMENTS)))  # noqa: S301
    assert file[2]["tokens"].tolist() == [9, 10]


def test_the_manifest_keeps_the_description(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "tokens", vocab_size=9, about={"tokenizer": "bytes"}) as writer:
        writer.append([1, 2])
    manifest = TokenFile(tmp_path / "tokens").manifest
    assert (manifest.num_tokens, manifest.num_documents, manifest.about) == (2, 1, {"tokenizer": "bytes"})


def test_an_index_outside_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match=r"document 3 is out of range: .* has 3 documents"):
        write_tokens(tmp_path / "tokens", DOCUMENTS)[3]


def test_unfinished_files_are_removed(tmp_path: Path) -> None:
    def write_half() -> None:
        with TokenFileWriter(tmp_path / "tokens", vocab_size=9) as writer:
            writer.append([1])
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", DOCUMENTS)
    with pytest.raises(UserError, match="tokens already exists; expected a new folder"):
        TokenFileWriter(tmp_path / "tokens", vocab_size=9)
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    with pytest.raises(UserError, match="link already exists; expected a new folder"):
        TokenFileWriter(tmp_path / "link", vocab_size=9)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no documents were written; expected at least one"),
        ([[1], []], "document 1 has no tokens"),
        ([[1, 9]], "document 0 has the tokens 1 to 9; expected 0 to 8"),
        ([[-1]], "document 0 has the tokens -1 to -1; expected 0 to 8"),
    ],
)
def test_refuses_tokens_that_cannot_be_read_again(tmp_path: Path, documents: list[list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        write_tokens(tmp_path / "tokens", documents, vocab_size=9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("vocab_size", [0, 2**32 + 1])
def test_refuses_an_empty_vocabulary(tmp_path: Path, vocab_size: int) -> None:
    with pytest.raises(UserError, match=f"vocab_size = {vocab_size}; expected 1 to 2"):
        TokenFileWriter(tmp_path / "tokens", vocab_size=vocab_size)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"manifest.json cannot be read \(No such file .*python -m d9d_loop.data"):
        TokenFile(tmp_path)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str) -> None:
    write_tokens(tmp_path / "tokens", DOCUMENTS)
    path = tmp_path / "tokens" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{name} has \d+ bytes; expected \d+, as its header, index or manifest says"):
        TokenFile(tmp_path / "tokens")
    path.unlink()
    with pytest.raises(UserError, match=rf"{name} is missing; expected it beside the other files"):
        TokenFile(tmp_path / "tokens")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "uint64"}, "dtype: Input should be 'uint16' or 'uint32'"),
        ({"format": "other"}, "format: Input should be 'd9d-tokens-1'"),
        ({"more": 1}, "more: Extra inputs are not permitted"),
        (
            {"num_tokens": 7},
            "records 12 bytes for tokens.bin; expected 14, for 3 documents with 7 tokens of uint16",
        ),
        ({"dtype": "uint32"}, "records 12 bytes for tokens.bin; expected 24"),
        ({"num_documents": 2}, "records 32 bytes for documents.bin; expected 24"),
        ({"files": {}}, "records no bytes for tokens.bin; expected 12"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_tokens(tmp_path / "tokens", DOCUMENTS)
    path = tmp_path / "tokens" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **change}), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        TokenFile(tmp_path / "tokens")


def test_a_manifest_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"manifest.json: the file: Invalid JSON"):
        TokenFile(tmp_path)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_verifying_finds_a_changed_byte(tmp_path: Path, name: str) -> None:
    file = write_tokens(tmp_path / "tokens", DOCUMENTS)
    path = tmp_path / "tokens" / name
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"{name} is damaged: its SHA-256 digest is \w+\.\.\., expected \w+"):
        file.verify()


def test_verifying_finds_documents_that_do_not_follow_one_another(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", numbered_documents([2, 2]))
    folder = tmp_path / "tokens"
    offsets = (5).to_bytes(8, "little").join([bytes(8), (4).to_bytes(8, "little")])
    (folder / "documents.bin").write_bytes(offsets)
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    manifest["files"]["documents.bin"]["sha256"] = hashlib.sha256(offsets).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(UserError, match="document 1 has the token range 5 to 4; expected a range that starts at 5"):
        TokenFile(folder).verify()
