"""Samples per second, time to open, and memory of indexed datasets, compared with megatron-core's GPTDataset; as JSON.

    python packages/d9d-loop/benchmarks/megatron_tokens.py --folder FOLDER

Requires megatron-core. Both read the same files on one core, in shuffled order, with samples of equal length. The index
of the second file has 10^8 documents, of which almost all are empty; GPTDataset does not open it.
"""

import argparse
import json
import os
import resource
import struct
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from d9d_loop.data import IndexedStream, TokenFileWriter, TokenWindows, open_tokens, write_tokens

_VOCAB_SIZE = 50_000


def main() -> None:
    """Measure, print JSON, and optionally write it."""
    parser = argparse.ArgumentParser(description="Reading of Megatron-LM's indexed datasets.")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=2048, help="positions of a sample")
    parser.add_argument("--samples", type=int, default=4000, help="samples to read for the rate")
    parser.add_argument("--large", type=int, default=10**8, help="documents of the index that is only opened")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        num_tokens = _write(folder, args.documents)
        count = min(args.samples, (num_tokens - 1) // args.length - 1)
        ours, theirs = _ours(folder, args.length), _theirs(folder, args.length, count)
        rates = [count / min(_alternating(each, count, args.repeats)) for each in (ours, theirs)]
        result = {
            "tokens": num_tokens,
            "positions": args.length,
            "samples": count,
            "samples_per_second": rates[0],
            "peer": {"megatron-core GPTDataset": rates[1]},
            "ratio": rates[0] / rates[1],
            "large_index": _large(folder, args.large),
        }
    text = json.dumps(result, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


def _write(folder: Path, num_documents: int) -> int:
    lengths = torch.randint(1, 2000, (num_documents,), generator=torch.Generator().manual_seed(0)).tolist()
    with TokenFileWriter(folder / "d9d", vocab_size=_VOCAB_SIZE) as writer:
        for number, length in enumerate(lengths):
            writer.append([(number + place) % _VOCAB_SIZE for place in range(length)])
    write_tokens(open_tokens(folder / "d9d"), folder / "data", "megatron", vocab_size=_VOCAB_SIZE)
    return sum(lengths)


def _ours(folder: Path, length: int) -> Callable[[int], Any]:
    windows = TokenWindows(open_tokens(folder / "data", vocab_size=_VOCAB_SIZE), length=length)
    stream = IndexedStream(windows, seed=0)
    entries = stream.cursor().take(len(windows))
    return lambda number: stream.read(entries[number])


def _theirs(folder: Path, length: int, count: int) -> Callable[[int], Any]:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: PLC0415
    from megatron.core.datasets.utils import Split  # noqa: PLC0415

    os.environ.setdefault("MASTER_ADDR", "localhost")
    tokenizer: Any = SimpleNamespace(
        eod=0, pad=_VOCAB_SIZE, vocab_size=_VOCAB_SIZE, unique_identifiers={"class": "none"}
    )
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=length,
        blend=([str(folder / "data")], None),
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=tokenizer,
        path_to_cache=str(folder / "cache"),
    )
    low = GPTDataset.build_low_level_dataset(str(folder / "data"), config)
    chosen = torch.arange(GPTDataset.numel_low_level_dataset(low), dtype=torch.int32).numpy()
    data = GPTDataset(low, str(folder / "data"), chosen, count, Split.train, config)
    return lambda number: data[number]


def _alternating(read: Callable[[int], Any], count: int, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        for number in range(count):
            read(number)
        seconds.append(time.process_time() - start)
    return seconds


def _large(folder: Path, num_documents: int) -> dict[str, float]:
    """Open an index whose first document has all tokens but two, and read the last document."""
    last = 1 << 16
    with (folder / "large.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, num_documents, num_documents + 1))
        header = file.tell()
        file.seek(header + 4 * (num_documents - 1))
        file.write(struct.pack("<i", 2))
        file.seek(header + 12 * num_documents - 8)
        file.write(struct.pack("<q", 2 * last))
        file.seek(header + 12 * num_documents + 8 * (num_documents - 1))
        file.write(struct.pack("<2q", num_documents - 1, num_documents))
    (folder / "large.bin").write_bytes(array("H", [1] * (last + 2)).tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    opened = open_tokens(folder / "large", vocab_size=_VOCAB_SIZE)
    seconds = time.perf_counter() - start
    opened[num_documents - 1]
    begin = time.perf_counter()
    opened.contents_digest()
    digest = time.perf_counter() - begin
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"documents": num_documents, "open_seconds": seconds, "digest_seconds": digest, "grown_mib": grown}


if __name__ == "__main__":
    main()
