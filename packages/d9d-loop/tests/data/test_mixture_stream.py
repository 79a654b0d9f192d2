from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from example_streams import assert_resumes_anywhere, lists_stream, numbered_documents, through_json, write_tokens

from d9d_dist import UserError
from d9d_loop.data import DocumentStream, IndexedStream, MixtureStream, PackedStream, Phase, SourceCount


def _mixture(weights: Any, **more: Any) -> MixtureStream:
    sources = {name: IndexedStream(range(100), seed=number) for number, name in enumerate(("web", "code", "math"))}
    return MixtureStream(sources, weights=weights, seed=3, **more)


def _shares(mixture: MixtureStream, count: int, skip: int = 0) -> list[float]:
    counts = Counter(source for source, _ in mixture.cursor().take(skip + count)[skip:])
    return [counts[source] / count for source in range(3)]


def test_a_mixture_resumes_at_any_entry_across_phases_and_epochs() -> None:
    sources = {"a": lists_stream(5, seed=0), "b": lists_stream(17, seed=1)}
    weights = [Phase({"a": 3, "b": 1}), Phase({"a": 1, "b": 4}, start=20, ramp=15)]
    assert_resumes_anywhere(MixtureStream(sources, weights=weights, seed=0), 60)
    assert_resumes_anywhere(MixtureStream(sources, weights=weights, unit="tokens", seed=0), 30)


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_a_mixture_resumes_at_any_entry_with_shares_that_are_not_binary_fractions(unit: Any) -> None:
    """The deficit of each source must be restored bit for bit: over many resumes errors would accumulate."""
    sources = {name: lists_stream(9, seed=seed) for seed, name in enumerate(("a", "b", "c"))}
    weights = [Phase({"a": 7, "b": 3, "c": 1.7}), Phase({"a": 0.3, "b": 1.1, "c": 2.9}, start=200, ramp=90)]
    mixture = MixtureStream(sources, weights=weights, unit=unit, temperature=1.3, seed=0)
    cursor, state = mixture.cursor(), None
    for position in range(500):
        resumed = mixture.cursor(state)
        assert resumed.take(1) == cursor.take(1), position
        state = through_json(resumed.state_dict())
        assert state == through_json(cursor.state_dict()), position


def test_each_source_keeps_its_own_order() -> None:
    entries = _mixture({"web": 5, "code": 2, "math": 1}).cursor().take(500)
    for source in range(3):
        taken = [entry for number, entry in entries if number == source]
        assert taken == IndexedStream(range(100), seed=source).cursor().take(len(taken))


def test_counts_of_sources_are_close_to_their_shares_at_every_position() -> None:
    mixture = _mixture({"web": 5, "code": 2, "math": 1})
    counts = Counter[int]()
    for position, (source, _) in enumerate(mixture.cursor().take(2000), 1):
        counts[source] += 1
        for number, share in enumerate((5 / 8, 2 / 8, 1 / 8)):
            assert abs(counts[number] - share * position) < 4  # independent draws would give about 20


def test_ranks_are_not_aligned_with_sources() -> None:
    sources = [source for source, _ in _mixture({"web": 1, "code": 1}).cursor().take(2000)]
    assert 0.4 < sum(sources[::2]) / 1000 < 0.6


def test_temperature_flattens_shares() -> None:
    weights = {"web": 16, "code": 4, "math": 1}
    assert _mixture(weights).shares(0) == pytest.approx((16 / 21, 4 / 21, 1 / 21))
    assert _mixture(weights, temperature=2.0).shares(0) == pytest.approx((4 / 7, 2 / 7, 1 / 7))
    assert _shares(_mixture(weights, temperature=1e6), 999) == pytest.approx([1 / 3] * 3, abs=0.01)


def test_shares_change_at_phases_and_along_ramps() -> None:
    phases = [Phase({"web": 1}), Phase({"code": 1}, start=100), Phase({"math": 1}, start=200, ramp=100)]
    mixture = _mixture(phases)
    assert _shares(mixture, 100) == [1, 0, 0]
    assert _shares(mixture, 100, skip=100) == [0, 1, 0]
    assert mixture.shares(225) == pytest.approx((0, 0.75, 0.25))
    assert _shares(mixture, 100, skip=200) == pytest.approx([0, 0.5, 0.5], abs=0.03)
    assert _shares(mixture, 100, skip=305) == [0, 0, 1]


def test_shares_may_be_of_tokens_instead_of_samples() -> None:
    sources = {"short": IndexedStream([[0] * 3] * 50, seed=0), "long": IndexedStream([[0] * 40] * 50, seed=0)}
    mixture = MixtureStream(sources, weights={"short": 1, "long": 1}, unit="tokens", seed=0)
    cursor = mixture.cursor()
    entries = cursor.take(1000)
    counts = mixture.counts(through_json(cursor.state_dict()))
    tokens = [sum(mixture.length(entry) for entry in entries if entry[0] == source) for source in (0, 1)]
    assert [counts[name].tokens for name in ("short", "long")] == tokens
    assert tokens[0] / sum(tokens) == pytest.approx(0.5, abs=0.01)


def test_counts_samples_of_each_source() -> None:
    mixture = _mixture({"web": 3, "code": 1})
    cursor = mixture.cursor()
    sources = Counter(source for source, _ in cursor.take(70))
    assert mixture.counts(cursor.state_dict()) == {
        "web": SourceCount(sources[0], 0),
        "code": SourceCount(sources[1], 0),
        "math": SourceCount(0, 0),
    }
    assert mixture.counts(None)["web"] == SourceCount(0, 0)


def test_samples_contain_their_source() -> None:
    mixture = MixtureStream(
        {"a": IndexedStream([{"x": 1}], seed=0), "b": IndexedStream([[5]], seed=0)}, weights={"a": 1, "b": 1}, seed=0
    )
    assert mixture.read((0, 0)) == {"x": 1, "source": 0}
    assert mixture.read((1, 0)) == [5]


def test_packed_rows_contain_the_source_of_each_position(tmp_path: Path) -> None:
    files = [write_tokens(tmp_path / name, numbered_documents([n] * 9)) for name, n in (("a", 4), ("b", 6))]
    sources = {str(n): DocumentStream(file, max_length=12, seed=n) for n, file in enumerate(files)}
    packed = PackedStream(MixtureStream(sources, weights={"0": 1, "1": 1}, seed=0), row_length=12, window=9, seed=0)
    for entry in packed.cursor().take(9):
        row = packed.read(entry)
        lengths = torch.bincount(row["documents"])
        for position, document in enumerate(row["documents"].tolist()):
            source = int(row["sources"][position])
            is_padding = int(row["labels"][position]) == -100
            assert source == (-1 if is_padding else {3: 0, 5: 1}[int(lengths[document])])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "the first phase of a mixture must have start = 0"),
        ([Phase({"web": 1}, start=5)], "the first phase of a mixture must have start = 0"),
        ({"web": 1, "books": 2}, "weights for books; expected names of sources: web, code, math"),
        ({"web": -1.0, "code": 2}, "expected finite weights of 0 or more, at least one of them above 0"),
        ({"web": 0}, "expected finite weights of 0 or more, at least one of them above 0"),
        ({"web": float("nan")}, "expected finite weights of 0 or more, at least one of them above 0"),
        (
            [Phase({"web": 1}), Phase({"web": 1}, 9, ramp=5), Phase({"code": 1}, 12)],
            "start = 9, ramp = 5 is foll",
        ),
    ],
)
def test_refuses_invalid_mixtures(weights: Mapping[str, float] | list[Phase], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _mixture(weights)


def test_refuses_a_temperature_of_zero() -> None:
    with pytest.raises(UserError, match="temperature = 0; expected a number above 0"):
        _mixture({"web": 1}, temperature=0)
