import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from example_streams import assert_resumes_anywhere
from example_streams import write_tokens as write_token_file
from other_tokens import raw, write_litdata, write_llm_c, write_mds, write_megatron

from d9d_dist import UserError
from d9d_loop.data import (
    DocumentStream,
    IndexedStream,
    MixtureStream,
    PackedStream,
    TokenWindows,
    open_tokens,
    write_tokens,
)

LENGTHS = (5, 0, 1, 300, 2, 17, 0)
DOCUMENTS = [[(7 * number + place) % 120 for place in range(length)] for number, length in enumerate(LENGTHS)]
FULL = [document for document in DOCUMENTS if document]


def _saved(folder: Path, **columns: list[Any]) -> Path:
    datasets = pytest.importorskip("datasets", reason="needs the extra huggingface")
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder), num_shards=2)
    return folder


def _megatron(dtype: str) -> Callable[[Path], Path]:
    return lambda folder: write_megatron(folder / "m", [[document] for document in DOCUMENTS], dtype)


WITH_DOCUMENTS: dict[str, tuple[Callable[[Path], Any], list[list[int]]]] = {
    **{f"Megatron-LM {dtype}": (_megatron(dtype), DOCUMENTS) for dtype in ("uint8", "int8", "int16", "int32")},
    **{f"Megatron-LM {dtype}": (_megatron(dtype), DOCUMENTS) for dtype in ("int64", "uint16")},
    "Megatron-LM with sentences": (
        lambda folder: write_megatron(folder / "m", [[each[:2], each[2:]] for each in DOCUMENTS] + [[]]),
        [*DOCUMENTS, []],
    ),
    "two of Megatron-LM": (
        lambda folder: [write_megatron(folder / name, [[each] for each in DOCUMENTS]) for name in ("a", "b")],
        DOCUMENTS * 2,
    ),
    "litdata": (
        lambda folder: write_litdata(
            folder / "l", [DOCUMENTS[:3], DOCUMENTS[3:]], data_format="no_header_tensor:16", dtype="int32"
        ),
        DOCUMENTS,
    ),
    "litdata of arrays": (
        lambda folder: write_litdata(folder / "l", [DOCUMENTS], data_format="no_header_numpy:5", dtype="uint16"),
        DOCUMENTS,
    ),
    "MDS bytes": (lambda folder: write_mds(folder / "s", [DOCUMENTS[:2], DOCUMENTS[2:]], "bytes", "int64"), DOCUMENTS),
    "MDS ndarray": (lambda folder: write_mds(folder / "s", [FULL], "ndarray", "int32"), FULL),
    "MDS of a dtype": (lambda folder: write_mds(folder / "s", [FULL], "ndarray:uint16", "uint16"), FULL),
    "MDS of a shape": (
        lambda folder: write_mds(folder / "s", [[DOCUMENTS[0]] * 2], "ndarray:int64:5", "int64"),
        [DOCUMENTS[0]] * 2,
    ),
    "datasets": (lambda folder: _saved(folder / "h", input_ids=DOCUMENTS), DOCUMENTS),
    "datasets with masks of ones": (
        lambda folder: _saved(
            folder / "h", tokens=DOCUMENTS, labels=DOCUMENTS, attention_mask=[[1] * len(each) for each in DOCUMENTS]
        ),
        DOCUMENTS,
    ),
}


@pytest.mark.parametrize("name", WITH_DOCUMENTS)
def test_documents_of_other_programs(name: str, tmp_path: Path) -> None:
    write, expected = WITH_DOCUMENTS[name]
    file = open_tokens(write(tmp_path), vocab_size=120)
    for each in (file, pickle.loads(pickle.dumps(file))):  # noqa: S301 - as data workers receive it
        assert [each[index]["tokens"].tolist() for index in range(len(each))] == expected
        assert each[0]["tokens"].dtype == torch.int64
    with pytest.raises(IndexError, match=f"document {len(file)} is out of range"):
        file.bounds(len(file))
    everything = [*chain.from_iterable(expected)]
    if file.num_tokens is not None:
        assert file.num_tokens == len(everything)
        assert file.tokens(3, len(everything) - 2).tolist() == everything[3:-2]
        windows = TokenWindows(file, length=10)
        labels = torch.cat([windows[index]["labels"] for index in range(len(windows))])
        assert labels.tolist() == everything[1 : 1 + len(labels)]
    same = write_token_file(tmp_path / "d9d", [document for document in expected if document])
    for shuffle in (False, True):  # the same rows as those of d9d's own file, without the empty documents
        options: dict[str, Any] = {"max_length": 12, "seed": 0, "epochs": 1, "shuffle": shuffle}
        streams = [DocumentStream(each, **options) for each in (same, file)]
        rows = [[stream.read(entry)["tokens"].tolist() for entry in stream.cursor().take(999)] for stream in streams]
        assert sorted(rows[0]) == sorted(rows[1])
    assert_resumes_anywhere(PackedStream(streams[1], row_length=12, window=4, seed=0), 9)


TOKENS = [*chain.from_iterable(DOCUMENTS)]
LLAMA = {"magic": 20240801, "version": 7}


@pytest.mark.parametrize("kind", ["nanoGPT", "llm.c", "llm.c of llama"])
def test_shards_without_documents(kind: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.bin" for name in ("a", "b")]
    for number, path in enumerate(paths):
        part = TOKENS[number * 100 : number * 100 + 150]
        if kind == "nanoGPT":
            path.write_bytes(raw(part, "uint16"))
        else:
            write_llm_c(path, part, **(LLAMA if kind == "llm.c of llama" else {}))
    file = open_tokens(paths, vocab_size=120)
    expected = TOKENS[:150] + TOKENS[100:250]
    assert file.num_tokens == 300
    assert file.tokens(0, 300).tolist() == expected
    windows = TokenWindows(file, length=64)
    mixed = MixtureStream(
        {"a": IndexedStream(windows, seed=0), "b": IndexedStream(windows, seed=1)}, weights={"a": 1, "b": 1}, seed=0
    )
    assert_resumes_anywhere(mixed, 9)
    with pytest.raises(UserError, match="has no document boundaries, so its documents cannot be packed"):
        DocumentStream(file, max_length=8, seed=0)


def _damaged(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


def _set(offset: int, layout: str, value: int) -> Callable[[bytes], bytes]:
    size = struct.calcsize(layout)
    return lambda data: data[:offset] + struct.pack(layout, value) + data[offset + size :]


def _bad_index(**changes: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = write_mds(folder / "s", [FULL], "bytes", "int64") / "index.json"
        index = json.loads(path.read_text())
        index["shards"][0] |= changes
        path.write_text(json.dumps(index))
        return path.parent

    return write


def _bad_megatron(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    return lambda folder: _damaged(_megatron("int32")(folder).with_name(name), change)


COUNT = len(DOCUMENTS)
ERRORS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tokens cut": (_bad_megatron("m.bin", lambda data: data[:-4]), r"m.bin has 1296 bytes; expected 1300"),
    "index cut": (
        _bad_megatron("m.idx", lambda data: data[:-8]),
        r"m.idx has 174 bytes; expected 182, for 7 sequences",
    ),
    "header cut": (
        _bad_megatron("m.idx", lambda data: data[:20]),
        r"m.idx has 20 bytes, which is less than its header",
    ),
    "no index": (_bad_megatron("m.idx", _set(0, "<B", 1)), r"m.idx is not a Megatron-LM index of version 1"),
    "floats": (_bad_megatron("m.idx", _set(17, "<B", 7)), r"has the dtype code 7; expected integers"),
    "multimodal": (_bad_megatron("m.idx", lambda data: data + bytes(COUNT)), r"stores a mode for each sequence"),
    "open end": (
        _bad_megatron("m.idx", _set(34 + 12 * COUNT + 8 * COUNT, "<q", 3)),
        r"the last document ends at sequence 3; expected 7",
    ),
    "a wild pointer": (_bad_megatron("m.idx", _set(34 + 4 * COUNT, "<q", 1 << 40)), r"m.bin is damaged: document 0"),
    "index alone": (
        lambda folder: (_megatron("int32")(folder).with_name("m.bin").unlink(), folder / "m")[1],
        r"m.bin is missing",
    ),
    "tokens alone": (
        lambda folder: (_megatron("int32")(folder).with_name("m.idx").unlink(), folder / "m.bin")[1],
        r"m.bin: every second value of 16 bits is at most 3, so its tokens have 32 bits .* put its .idx beside it",
    ),
    "an odd size": (lambda folder: _write(folder / "x.bin", b"123"), r"x.bin has 3 bytes; expected an even number"),
    "no bytes": (lambda folder: _write(folder / "x.bin", b""), r"x.bin is empty"),
    "shard cut": (
        lambda folder: _damaged(write_llm_c(folder / "x.bin", TOKENS), lambda data: data[:-2]),
        r"x.bin has 1672 bytes; expected 1674",
    ),
    "version": (lambda folder: write_llm_c(folder / "x.bin", TOKENS, version=2), r"llm.c of version 2; expected 1"),
    "another vocabulary": (
        lambda folder: _write(folder / "x.bin", raw([5, 120, 3], "uint16")),
        r"x.bin has the tokens 3 to 120; expected 0 to 119, the vocabulary of the tokenizer",
    ),
    "negative": (
        lambda folder: write_megatron(folder / "m", [[[1, -1, 2]]]),
        r"m.bin has the tokens -1 to 2; expected 0 to 119",
    ),
    "no documents": (lambda folder: write_megatron(folder / "m", [[[]], [[]]]), r"m.bin has no tokens"),
    "an index of others": (
        lambda folder: _write(folder / "f" / "index.json", b"{}").parent,
        r"index.json: chunks: Field required; expected an index of MosaicML or litdata",
    ),
    "no JSON": (lambda folder: _write(folder / "f" / "index.json", b"{").parent, r"index.json: the file: Invalid JSON"),
    "a pickled column": (_bad_index(column_encodings=["int", "pkl", "str"]), r"tokens with the encoding pkl; expected"),
    "no tokens": (_bad_index(column_names=["id", "text", "url"]), r"has the columns id, text, url; expected one of"),
    "labels": (_bad_index(column_names=["id", "tokens", "labels"]), r"and no masks or labels"),
    "an entry lacks": (_bad_index(column_sizes=3), r"index.json: shards.0.column_sizes: Input should be a valid array"),
    "samples": (_bad_index(samples=9), r"is damaged: its header does not have 9 samples"),
    "compressed": (
        _bad_index(raw_data={"basename": "x.mds", "bytes": 1}, zip_data={"basename": "x.mds.zstd", "bytes": 1}),
        r"x.mds is missing, and x.mds.zstd is compressed",
    ),
    "litdata of dictionaries": (
        lambda folder: write_litdata(folder / "l", [FULL], data_format="int", dtype="int32"),
        r"litdata dataset with items of \['int'\]",
    ),
    "a padded row": (
        lambda folder: _saved(
            folder / "h", input_ids=FULL, attention_mask=[[1] * (len(each) - 1) + [0] for each in FULL]
        ),
        r"h, row 0: the column attention_mask masks tokens; expected rows without padding",
    ),
    "a folder": (lambda folder: folder, r"has no tokens; expected a token file, or tokens of Megatron-LM"),
    "nothing": (lambda folder: folder / "no", r"no does not exist; expected a token file"),
    "mixed": (
        lambda folder: [_megatron("int32")(folder), write_llm_c(folder / "x.bin", TOKENS)],
        r"got tokens of several formats .*; expected one format",
    ),
}


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ERRORS)
def test_damaged_and_unknown_files_are_errors(name: str, tmp_path: Path) -> None:
    write, message = ERRORS[name]
    with pytest.raises(UserError, match=message):
        open_tokens(write(tmp_path), vocab_size=120)


def test_a_token_that_only_a_later_document_has_is_an_error_where_it_is_read(tmp_path: Path) -> None:
    documents = [[[1] * 9000] for _ in range(70)]
    documents[40][0][8999] = 300
    file = open_tokens(write_megatron(tmp_path / "m", documents), vocab_size=120)
    with pytest.raises(UserError, match="has the tokens 1 to 300; expected 0 to 119"):
        file[40]


def test_documents_apart_have_no_windows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stores each document apart, so there are no windows across documents"):
        TokenWindows(open_tokens(_saved(tmp_path / "h", input_ids=DOCUMENTS)), length=4)


@pytest.mark.parametrize(
    ("to", "vocab_size"), [("megatron", 120), ("megatron", 70_000), ("llm.c", 120), ("llm.c", 70_000), ("nanogpt", 120)]
)
def test_written_formats_are_those_of_their_readers(to: Any, vocab_size: int, tmp_path: Path) -> None:
    file = open_tokens(write_megatron(tmp_path / "m", [[each] for each in DOCUMENTS]))
    write_tokens(file, tmp_path / "out", to, vocab_size=vocab_size)
    written = (tmp_path / "out.bin").read_bytes()
    is_small = vocab_size == 120
    if to == "megatron":
        write_megatron(tmp_path / "same", [[each] for each in DOCUMENTS], "uint16" if is_small else "int32")
        assert (tmp_path / "out.idx").read_bytes() == (tmp_path / "same.idx").read_bytes()
        assert written == (tmp_path / "same.bin").read_bytes()
    elif to == "llm.c":
        assert written == write_llm_c(tmp_path / "same", TOKENS, **({} if is_small else LLAMA)).read_bytes()
    else:
        assert written == raw(TOKENS, "uint16")
    assert (again := open_tokens(tmp_path / "out.bin", vocab_size=120)).num_tokens == len(TOKENS)
    assert again.tokens(0, len(TOKENS)).tolist() == TOKENS


def test_formats_that_cannot_hold_the_tokens_are_errors(tmp_path: Path) -> None:
    file = open_tokens(write_megatron(tmp_path / "m", [[each] for each in DOCUMENTS]))
    with pytest.raises(UserError, match=r"the tokens have no recorded vocab_size, and megatron needs"):
        write_tokens(file, tmp_path / "out", "megatron")
    with pytest.raises(UserError, match=r"nanoGPT's format has 16 bits, and the vocabulary 70000 tokens"):
        write_tokens(file, tmp_path / "out", "nanogpt", vocab_size=70_000)


def test_opening_does_not_depend_on_the_number_of_documents(tmp_path: Path) -> None:
    """A sparse index of 10^8 documents: reading it takes gigabytes, opening it a few system calls."""
    count = 10**8
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count, count + 1)
    with (tmp_path / "m.idx").open("wb") as file:
        file.write(index)
        file.seek(34 + 4 * (count - 1))
        file.write(struct.pack("<i", 2))  # the length of the last sequence, which starts at 0
        file.seek(34 + 12 * count + 8 * count)
        file.write(struct.pack("<q", count))
    (tmp_path / "m.bin").write_bytes(raw([3, 4], "uint16"))
    tracemalloc.start()
    opened = open_tokens(tmp_path / "m")
    assert len(opened) == count
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
