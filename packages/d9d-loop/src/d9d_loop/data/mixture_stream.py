"""Mixture of streams in given shares, which may change over time: weights, temperature, phases, annealing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import Any, Literal, final

from pydantic import JsonValue

from d9d_dist import UserError, stream_key
from d9d_dist.errors import check_choice
from d9d_loop.data.json_lines import JsonObject
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream

Unit = Literal["samples", "tokens"]
"""Unit in which the shares of a mixture are measured."""


@final
@dataclass(frozen=True, slots=True)
class Phase:
    """Weights of a mixture from a given position on.

    Attributes:
        weights: Relative weight of each source, by name. A missing source has weight 0.
        start: Position in the mixture at which the phase starts, in the unit of the mixture (samples or tokens).
        ramp: Length of the linear transition from the previous shares, in the same unit; 0 switches immediately.
    """

    weights: Mapping[str, float]
    start: int = 0
    ramp: int = 0


@final
@dataclass(frozen=True, slots=True)
class SourceCount:
    """Number of samples and tokens that a mixture has taken from a source."""

    samples: int
    tokens: int


@final
class MixtureStream(SampleStream):
    """Mixture of streams in which each source has a given share of the entries.

    Each entry comes from a source whose count is below its share, drawn with a probability in proportion to its
    deficit. So the counts stay close to the shares at every position, without a periodic pattern that could align with
    the ranks. Each source has its own position and epochs.

    Dictionary samples get the key `source`, the index of their source in the order of `sources`. The index
    allows losses per source; `PackedStream` converts it to `sources`.

    Args:
        temperature: Weights are raised to the power 1 / temperature; values above 1 make them more uniform ("Massively
            Multilingual Neural Machine Translation in the Wild", arXiv:1907.05019, section 4).
        unit: Unit of shares and of the positions of phases: `samples`, or `tokens` as measured by `length`.

    Raises:
        UserError: If the weights, phases, temperature or unit are invalid, or a source is finite.
    """

    def __init__(
        self,
        sources: Mapping[str, SampleStream],
        *,
        weights: Mapping[str, float] | Sequence[Phase],
        temperature: float = 1.0,
        unit: Unit = "samples",
        seed: int,
    ) -> None:
        check_choice("unit", unit, Unit)
        phases = [Phase(weights)] if isinstance(weights, Mapping) else list(weights)
        _check_phases(phases, sources)
        if not 0 < temperature < inf:
            raise UserError(f"temperature = {temperature}; expected a number above 0.")
        if ending := [name for name, stream in sources.items() if not stream.is_endless]:
            raise UserError(
                f"the mixture sources {', '.join(ending)} are finite; expected endless streams, since a mixture "
                "repeats its sources according to their weights. Set epochs=None for these sources."
            )
        self._sources = dict(sources)
        self._streams = list(sources.values())
        self._phases = [
            (phase.start, phase.ramp, _shares([phase.weights.get(name, 0.0) for name in sources], temperature))
            for phase in phases
        ]
        self._unit: Unit = unit
        self._seed = seed

    def cursor(self, state: JsonValue = None) -> Cursor:
        """Return a cursor, whose state contains the state of each source."""
        return _MixtureCursor(self, state)

    def read(self, entry: tuple[int, Entry]) -> Any:
        """Read the sample that `entry` points to. If it is a dictionary, add the index of its source."""
        number, inner = entry
        sample = self._streams[number].read(inner)
        if isinstance(sample, JsonObject):
            return JsonObject(sample, source=number)
        return {**sample, "source": number} if isinstance(sample, Mapping) else sample

    def length(self, entry: tuple[int, Entry]) -> int:
        """Return the sample length in tokens."""
        number, inner = entry
        return self._streams[number].length(inner)

    def identity(self) -> JsonValue:
        """Return the phases, the unit, the seed, and the identities of the sources."""
        phases: JsonValue = [[start, ramp, *shares] for start, ramp, shares in self._phases]
        sources: JsonValue = {name: stream.identity() for name, stream in self._sources.items()}
        return {"mixture": {"phases": phases, "unit": self._unit, "seed": self._seed, "of": sources}}

    def shares(self, position: int) -> tuple[float, ...]:
        """Return the share of each source at a position in samples or tokens, depending on the unit; the sum is 1."""
        before: tuple[float, ...] = self._phases[0][2]
        for start, ramp, shares in self._phases:
            if position < start:
                break
            part = min((position - start) / ramp, 1.0) if ramp else 1.0
            before = tuple(old + part * (new - old) for old, new in zip(before, shares, strict=True))
        return before

    def counts(self, state: Any) -> dict[str, SourceCount]:
        """Return the samples and tokens taken from each source at a cursor state of this stream, by source name.

        `None` is the start of the stream. Tokens are counted only if the unit is `tokens`, and are 0 otherwise.
        """
        state = state or _start(len(self._streams))
        counted = zip(self._sources, state["samples"], state["tokens"], strict=True)
        return {name: SourceCount(samples, tokens) for name, samples, tokens in counted}


@final
class _MixtureCursor(Cursor):
    """Cursor that keeps, for each source, the samples and tokens taken and the deficit relative to its share."""

    def __init__(self, mixture: MixtureStream, state: Any) -> None:
        self._mixture, self._streams = mixture, mixture._streams
        state = state or _start(len(self._streams))
        self._samples, self._tokens, self._behind = (list(state[key]) for key in ("samples", "tokens", "behind"))
        self._cursors = [stream.cursor(each) for stream, each in zip(self._streams, state["sources"], strict=True)]

    def take(self, num_entries: int) -> list[tuple[int, Entry]]:
        return [self._next() for _ in range(num_entries)]

    def state_dict(self) -> JsonValue:
        """Return the counts, deficit and cursor state of each source."""
        states = [cursor.state_dict() for cursor in self._cursors]
        counts = {"samples": list(self._samples), "tokens": list(self._tokens), "behind": list(self._behind)}
        return {**counts, "sources": states}

    def _next(self) -> tuple[int, Entry]:
        num_before = sum(self._samples)
        in_tokens = self._mixture._unit == "tokens"
        shares = self._mixture.shares(sum(self._tokens) if in_tokens else num_before)
        source = self._draw(shares, num_before)
        (entry,) = self._cursors[source].take(1)
        size = 1
        if in_tokens:
            size = self._streams[source].length(entry)
            self._tokens[source] += size
        self._samples[source] += 1
        self._behind = [behind + share * size for behind, share in zip(self._behind, shares, strict=True)]
        self._behind[source] -= size
        return source, entry

    def _draw(self, shares: Sequence[float], number: int) -> int:
        owed = [max(behind + share, 0.0) if share else 0.0 for behind, share in zip(self._behind, shares, strict=True)]
        if not any(owed):  # every source with a deficit has share 0 in this phase
            owed = list(shares)
        point = stream_key(self._mixture._seed, "mixture", number) / (1 << 63) * sum(owed)
        source = 0
        for candidate, width in enumerate(owed):
            if width:
                source = candidate
                point -= width
                if point < 0:
                    break
        return source


def _start(num: int) -> dict[str, list[Any]]:
    return {"samples": [0] * num, "tokens": [0] * num, "behind": [0.0] * num, "sources": [None] * num}


def _shares(weights: Sequence[float], temperature: float) -> tuple[float, ...]:
    powers = [weight ** (1 / temperature) for weight in weights]
    # Rounded, because powers differ in their last bits between machines, and all ranks must draw the same source.
    return tuple(round(power / sum(powers), 12) for power in powers)


def _check_phases(phases: Sequence[Phase], sources: Mapping[str, SampleStream]) -> None:
    if not phases or phases[0].start != 0 or phases[0].ramp != 0:
        raise UserError("the first phase of a mixture must have start = 0 and ramp = 0, because no phase precedes it.")
    for phase in phases:
        if unknown := sorted(phase.weights.keys() - sources.keys()):
            raise UserError(f"weights for {', '.join(unknown)}; expected names of sources: {', '.join(sources)}.")
        if not all(isfinite(weight) and weight >= 0 for weight in phase.weights.values()) or not any(
            phase.weights.values()
        ):
            raise UserError(
                f"weights {dict(phase.weights)}; expected finite weights of 0 or more, at least one of them above 0. "
                "Omit a source to exclude it."
            )
    for phase, following in pairwise(phases):
        if phase.ramp < 0 or following.ramp < 0 or phase.start + phase.ramp > following.start:
            raise UserError(
                f"the phase with start = {phase.start}, ramp = {phase.ramp} is followed by the phase with start = "
                f"{following.start}, ramp = {following.ramp}; expected ramps of 0 or more, and each start after the "
                "ramp of the previous phase. Change the starts or ramps."
            )
