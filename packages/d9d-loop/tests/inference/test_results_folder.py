import json
from pathlib import Path

import pytest

from d9d_dist import UserError
from d9d_loop.inference.results_folder import ResultsFolder


def _folder(path: Path, num_samples: int = 7, part_size: int = 3) -> ResultsFolder:
    return ResultsFolder(path, num_samples=num_samples, part_size=part_size)


def _write(results: ResultsFolder, part: int) -> None:
    results.write(part, [{"sample": index} for index in results.samples_of(part)])


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    results = _folder(tmp_path)
    assert results.num_parts == 3
    assert results.missing() == [0, 1, 2]
    for part in (2, 0):
        _write(results, part)
    results = _folder(tmp_path)  # another start
    results.check()
    assert not results.is_complete()
    assert results.missing() == [1]
    _write(results, 1)
    results.finish()
    lines = [json.loads(line) for line in results.file.read_text().splitlines()]
    assert lines == [{"sample": index} for index in range(7)]
    assert results.is_complete()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "results.jsonl"]
    assert _folder(tmp_path).missing() == []


def test_a_partially_written_part_counts_as_missing(tmp_path: Path) -> None:
    results = _folder(tmp_path)
    results.missing()
    (tmp_path / "parts" / ".part-00000001.jsonl.partial").write_text("{", encoding="utf-8")
    assert results.missing() == [0, 1, 2]
    _write(results, 1)
    assert results.missing() == [0, 2]


@pytest.mark.parametrize("other", [{"num_samples": 8}, {"part_size": 4}])
def test_parts_of_another_job_are_refused(tmp_path: Path, other: dict[str, int]) -> None:
    _folder(tmp_path).missing()
    with pytest.raises(
        UserError,
        match=r"holds results of another job.*:\n  (num_samples was 7|part_size was 3), and now is .*\n.*--run\.name",
    ):
        _folder(tmp_path, **other).check()


def test_no_results_at_first(tmp_path: Path) -> None:
    results = _folder(tmp_path / "new")
    results.check()
    assert not results.is_complete()
    assert not (tmp_path / "new").exists()
