from pathlib import Path
from typing import Any

from example_streams import numbered_documents, some_lengths, write_tokens

from d9d_loop.data import DocumentStream, PackedStream, SampleStream, TokenFile
from d9d_loop.data.packed_provider import PackedProvider

LENGTH = 8


class _Texts(PackedProvider):
    def _rows(self, samples: TokenFile, *, seed: int, **options: Any) -> SampleStream:
        documents = DocumentStream(samples, max_length=LENGTH, seed=seed, **options)
        return PackedStream(documents, row_length=LENGTH, window=16, seed=seed)


def _labels(stream: SampleStream, num_rows: int) -> list[int]:
    rows = []
    cursor = stream.cursor()
    while len(rows) < num_rows and (entries := cursor.take(num_rows - len(rows))):
        rows += [stream.read(entry)["labels"] for entry in entries]
    return [label for row in rows for label in row.tolist() if label != -100]


def test_held_out_documents_are_labels_once_in_an_order_that_no_job_changes(tmp_path: Path) -> None:
    lengths = some_lengths(64, seed=2, longest=20)
    file = write_tokens(tmp_path / "tokens", numbered_documents(lengths))
    data, other = _Texts(file, file, shuffle=False, epochs=3), _Texts(file, file, shuffle=True, epochs=None)
    starts = {sum(lengths[:number]) for number in range(len(lengths))}
    held_out = data.evaluation()
    assert held_out is not None
    found = _labels(held_out, 10**6)
    assert sorted(found) == [token for token in range(sum(lengths)) if token not in starts]
    same = other.evaluation()
    assert same is not None
    assert same.identity() == held_out.identity()
    assert max(_labels(held_out, 8)) >= sum(lengths[:16]), "expected rows of the whole file, not of its first window"


def test_training_has_the_order_and_epochs_of_the_job(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens", numbered_documents([5] * 32))
    data = _Texts(file, None, shuffle=False, epochs=2)
    assert data.evaluation() is None
    assert not data.draws
    assert sorted(_labels(data.training(seed=1), 8)) == sorted(set(range(80)) - set(range(0, 80, 5)))
    assert len(_labels(data.training(seed=1), 10**6)) == 2 * 32 * 4
    shuffled = _Texts(file, None, shuffle=True, epochs=None).training(seed=1)
    assert shuffled.is_endless
    assert max(_labels(shuffled, 8)) > 80
