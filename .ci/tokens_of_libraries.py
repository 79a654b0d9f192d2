"""Write and read tokens with another program's library, in an environment of its own; see check_tokens.py.

    python tokens_of_libraries.py LIBRARY FOLDER

FOLDER has `documents.json`. The datasets are written to FOLDER/ours-*, and their documents, as the library reads them,
to FOLDER/read.json, by name. Of `megatron`, FOLDER/d9d was written by d9d, and is read too.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

Read = dict[str, list[list[int]]]
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")


def megatron(folder: Path, documents: list[list[int]]) -> Read:
    import torch  # noqa: PLC0415
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder  # noqa: PLC0415

    names = []
    for dtype in DTYPES:
        for kind in ("documents", "sentences"):
            prefix = folder / f"ours-{dtype}-{kind}"
            builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, dtype))
            for tokens in documents:
                if kind == "documents":
                    builder.add_document(torch.tensor(tokens, dtype=torch.int64), [len(tokens)])
                else:
                    half = len(tokens) // 2
                    builder.add_document(torch.tensor(tokens, dtype=torch.int64), [half, len(tokens) - half])
            builder.end_document()  # a document without sequences
            builder.finalize(f"{prefix}.idx")
            names.append(prefix.name)
    read = {}
    for name in (*names, "d9d"):
        data = IndexedDataset(str(folder / name))
        ends = data.document_indices.tolist()
        pairs = pairwise(ends)
        read[name] = [[int(each) for part in range(*pair) for each in data[part]] for pair in pairs]
    return read


def streaming(folder: Path, documents: list[list[int]]) -> Read:
    from streaming import LocalDataset, MDSWriter  # noqa: PLC0415

    full = [tokens for tokens in documents if tokens]
    fixed = [tokens[:2] for tokens in documents if len(tokens) > 1]
    cases: dict[str, tuple[str, type, list[list[int]]]] = {
        "bytes": ("bytes", np.int64, documents),
        "ndarray": ("ndarray", np.int32, full),
        "uint16": ("ndarray:uint16", np.uint16, full),
        "fixed": ("ndarray:uint32:2", np.uint32, fixed),
    }
    read = {}
    for name, (encoding, dtype, chosen) in cases.items():
        out = str(folder / f"ours-{name}")
        columns = {"id": "int", "tokens": encoding, "url": "str"}
        with MDSWriter(out=out, columns=columns, size_limit=512) as writer:
            for number, tokens in enumerate(chosen):
                row = np.array(tokens, dtype=dtype)
                writer.write(
                    {"id": number, "tokens": row.tobytes() if encoding == "bytes" else row, "url": "x" * number}
                )
        data = LocalDataset(local=out)
        values = [data[index]["tokens"] for index in range(len(data))]
        rows = [np.frombuffer(each, np.int64) if encoding == "bytes" else each for each in values]
        read[f"ours-{name}"] = [row.tolist() for row in rows]
    return read


def litdata(folder: Path, documents: list[list[int]]) -> Read:
    """Write documents; `TokensLoader` reads blocks, without the rest of a chunk, so a document is a block."""
    import torch  # noqa: PLC0415
    from litdata.streaming.cache import Cache  # noqa: PLC0415
    from litdata.streaming.dataset import StreamingDataset  # noqa: PLC0415
    from litdata.streaming.item_loader import TokensLoader  # noqa: PLC0415

    size = 8
    blocks = [tokens[:size] for tokens in documents if len(tokens) >= size]
    read = {}
    torch_dtypes = [dtype for dtype in DTYPES if dtype != "int8"]
    makes: dict[str, Callable[[list[int]], object]] = {
        **{f"torch-{name}": partial(torch.tensor, dtype=getattr(torch, name)) for name in torch_dtypes},
        **{name: partial(np.array, dtype=name) for name in DTYPES},
    }
    for kind, make in makes.items():
        out = folder / f"ours-{kind}"
        out.mkdir()
        cache = Cache(str(out), chunk_size=size * 3, item_loader=TokensLoader(size))
        for number, tokens in enumerate(blocks):
            cache[number] = make(tokens)
        cache.done()
        cache.merge()
        data = StreamingDataset(str(out), item_loader=TokensLoader(size))
        read[f"ours-{kind}"] = [data[index].tolist() for index in range(len(data))]
    return read


LIBRARIES: dict[str, Callable[[Path, list[list[int]]], Read]] = {
    "megatron": megatron,
    "streaming": streaming,
    "litdata": litdata,
}

if __name__ == "__main__":
    folder = Path(sys.argv[2])
    given = json.loads((folder / "documents.json").read_text())
    (folder / "read.json").write_text(json.dumps(LIBRARIES[sys.argv[1]](folder, given)))
