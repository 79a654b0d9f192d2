"""Best-fit packing of documents: fraction of padding, speed, and balance of tokens over ranks, as JSON.

    python packages/d9d-loop/benchmarks/packing.py

Two references pack the same lengths: rows filled in document order, each closed when the next document does not fit;
and batches of 8 documents padded to the longest. Seconds are CPU time, the minimum over all repetitions.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from d9d_loop.data import DocumentStream, PackedStream, TokenFile, TokenFileWriter, best_fit_decreasing


def main() -> None:
    """Measure, print JSON, and optionally write it."""
    parser = argparse.ArgumentParser(description="Padding and speed of best-fit packing.")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--row-length", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--mean-log", type=float, default=6.0, help="mean of the logarithm of the lengths")
    parser.add_argument("--spread-log", type=float, default=1.0, help="standard deviation of the logarithm")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    draws = random.Random(0)  # noqa: S311 - no secret
    drawn = [max(int(draws.lognormvariate(args.mean_log, args.spread_log)), 2) for _ in range(args.documents)]
    result = {
        "documents": args.documents,
        "lognormal": [args.mean_log, args.spread_log],
        "rows_of": {length: _measure(drawn, length, args.ranks, args.repeats) for length in args.row_length},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


def _measure(drawn: list[int], row_length: int, num_ranks: int, repeats: int) -> dict[str, object]:
    lengths = [min(length, row_length) for length in drawn]
    num_rows = len(best_fit_decreasing(lengths, row_length))
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        best_fit_decreasing(lengths, row_length)
        seconds.append(time.process_time() - start)
    return {
        "waste": {
            "best_fit": 1 - sum(lengths) / (num_rows * row_length),
            "in_order": 1 - sum(lengths) / (_rows_in_order(lengths, row_length) * row_length),
            "padded_batches_of_8": _padding(lengths, 8),
        },
        "million_documents_per_second": len(lengths) / min(seconds) / 1e6,
        **_stream(drawn, row_length, num_ranks),
    }


def _rows_in_order(lengths: list[int], row_length: int) -> int:
    rows, room = 0, 0
    for length in lengths:
        if length > room:
            rows, room = rows + 1, row_length
        room -= length
    return rows


def _padding(lengths: list[int], size: int) -> float:
    batches = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    return 1 - sum(lengths) / sum(max(batch) * len(batch) for batch in batches)


def _stream(drawn: list[int], row_length: int, num_ranks: int) -> dict[str, object]:
    """Measure one epoch of the stream (order, lengths from the file, packing, rows), and each rank's part of it."""
    with tempfile.TemporaryDirectory() as folder:
        with TokenFileWriter(Path(folder, "tokens"), vocab_size=1) as writer:
            for length in drawn:
                writer.append([0] * (length + 1))
        documents = DocumentStream(TokenFile(Path(folder, "tokens")), max_length=row_length, seed=0)
        packed = PackedStream(documents, row_length=row_length, seed=0)
        num_rows = sum(drawn) // row_length // num_ranks * num_ranks
        start = time.process_time()
        rows = packed.cursor().take(num_rows)
        seconds = time.process_time() - start
    of_ranks = [sum(map(packed.length, rows[rank::num_ranks])) for rank in range(num_ranks)]
    return {
        "stream_million_documents_per_second": sum(map(len, rows)) / seconds / 1e6,
        "stream_waste": 1 - sum(of_ranks) / (num_rows * row_length),
        "tokens_of_ranks_max_over_min": max(of_ranks) / min(of_ranks),
    }


if __name__ == "__main__":
    main()
