"""Mixes streams in given shares, which may change along the way: weights, temperature, phases, annealing."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf, isfinite
from typing import Any, Literal, final

from pydantic import JsonValue, TypeAdapter

from d9d_dist import UserError, stream_key
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream

Unit = Literal["samples", "tokens"]
"""What the shares of a mixture are shares of."""


@final
@dataclass(frozen=True, slots=True)
class Phase:
    """From where on a mixture has which weights.

    Attributes:
        weights: Of each source; in proportion to each other. A source without one has none.
        start: Samples or tokens of the mixture before the phase.
        ramp: Samples or tokens over which the shares move here from those before, linearly; 0 for at once.
    """

    weights: Mapping[str, float]
    start: int = 0
    ramp: int = 0


@final
@dataclass(frozen=True, slots=True)
class SourceCount:
    """What a mixture took of a source so far."""

    samples: int
    tokens: int


@final
class MixtureStream(SampleStream):
    """A stream that takes each entry from one of several, such that their shares of what was taken are as asked for.

    The next entry comes from a source that is behind its share, drawn at random in proportion to how far it is behind:
    shares are met closely at every moment, without a pattern that ranks could fall in step with. Each source keeps its
    own place and its own epochs.

    Samples that are dictionaries get `source`, the number of their source in the order of `sources`, which losses of
    each source can be told by; `PackedStream` makes `sources` of it.

    Args:
        sources: The streams, by name.
        weights: Weight of each, or phases of weights.
        temperature: Weights are raised to the power 1 / temperature: 1 leaves them, and the higher it is, the more
            alike they become ("Massively Multilingual Neural Machine Translation in the Wild", arXiv:1907.05019,
            section 4).
        unit: Whether shares, and the starts of phases, count samples, or tokens as `length` tells them.
        seed: Chooses among the sources that are behind.

    Raises:
        UserError: If weights, phases or the temperature make no mixture.
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
        phases = [Phase(weights)] if isinstance(weights, Mapping) else list(weights)
        _check_phases(phases, sources)
        if not 0 < temperature < inf:
            raise UserError(f"temperature = {temperature}; expected a number above 0.")
        self._sources = dict(sources)
        self._streams = list(sources.values())
        self._phases = [
            (phase.start, phase.ramp, _shares([phase.weights.get(name, 0.0) for name in sources], temperature))
            for phase in phases
        ]
        self._unit: Unit = unit
        self._seed = seed

    def cursor(self, state: JsonValue = None) -> Cursor:
        """A place in the stream."""
        return _MixtureCursor(
            self._streams, self.shares, _read_place(state, self._streams), unit=self._unit, seed=self._seed
        )

    def read(self, entry: tuple[int, Entry]) -> Any:
        """The sample of an entry; a dictionary with its source's number."""
        number, inner = entry
        sample = self._streams[number].read(inner)
        return {**sample, "source": number} if isinstance(sample, Mapping) else sample

    def length(self, entry: tuple[int, Entry]) -> int:
        """The length of an entry's sample."""
        number, inner = entry
        return self._streams[number].length(inner)

    def identity(self) -> JsonValue:
        """The sources, and how they are mixed."""
        phases: JsonValue = [[start, ramp, *shares] for start, ramp, shares in self._phases]
        sources: JsonValue = {name: stream.identity() for name, stream in self._sources.items()}
        return {"mixture": {"phases": phases, "unit": self._unit, "seed": self._seed, "of": sources}}

    def shares(self, position: int) -> tuple[float, ...]:
        """The share of each source, in their order, after so many samples or tokens; they add up to 1."""
        before: tuple[float, ...] = self._phases[0][2]
        for start, ramp, shares in self._phases:
            if position < start:
                break
            part = min((position - start) / ramp, 1.0) if ramp else 1.0
            before = tuple(old + part * (new - old) for old, new in zip(before, shares, strict=True))
        return before

    def counts(self, state: JsonValue) -> dict[str, SourceCount]:
        """What was taken of each source up to a place, a state of this stream; tokens only where they are the unit."""
        place = _read_place(state, self._streams)
        counted = zip(self._sources, place.samples, place.tokens, strict=True)
        return {name: SourceCount(samples, tokens) for name, samples, tokens in counted}


@dataclass(slots=True)
class _Place:
    """How much of each source was taken, how far each is behind its share, and where it stands."""

    samples: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)
    sources: list[JsonValue] = field(default_factory=list)


_PLACE = TypeAdapter(_Place)


def _read_place(state: JsonValue, streams: Sequence[SampleStream]) -> _Place:
    if state is not None:
        return _PLACE.validate_python(state)
    num = len(streams)
    return _Place([0] * num, [0] * num, [0.0] * num, [None] * num)


@final
class _MixtureCursor(Cursor):
    def __init__(self, streams: Sequence[SampleStream], shares: Any, place: _Place, *, unit: Unit, seed: int) -> None:
        self._streams, self._shares = streams, shares
        self._unit: Unit = unit
        self._seed = seed
        self._samples, self._tokens, self._behind = list(place.samples), list(place.tokens), list(place.behind)
        self._cursors = [stream.cursor(state) for stream, state in zip(streams, place.sources, strict=True)]

    def take(self, num_entries: int) -> list[tuple[int, Entry]]:
        """The next entries, each with the number of its source."""
        return [self._next() for _ in range(num_entries)]

    def state_dict(self) -> JsonValue:
        """What was taken of each source, and its place."""
        states = [cursor.state_dict() for cursor in self._cursors]
        return asdict(_Place(list(self._samples), list(self._tokens), list(self._behind), states))

    def _next(self) -> tuple[int, Entry]:
        num_before = sum(self._samples)
        shares = self._shares(num_before if self._unit == "samples" else sum(self._tokens))
        source = self._draw(shares, num_before)
        (entry,) = self._cursors[source].take(1)
        size = 1
        if self._unit == "tokens":
            size = self._streams[source].length(entry)
            self._tokens[source] += size
        self._samples[source] += 1
        self._behind = [behind + share * size for behind, share in zip(self._behind, shares, strict=True)]
        self._behind[source] -= size
        return source, entry

    def _draw(self, shares: Sequence[float], number: int) -> int:
        owed = [max(behind + share, 0.0) if share else 0.0 for behind, share in zip(self._behind, shares, strict=True)]
        if not any(owed):  # those that are behind have no share any more
            owed = list(shares)
        point = stream_key(self._seed, "mixture", number) / (1 << 63) * sum(owed)
        source = 0
        for candidate, width in enumerate(owed):
            if width:
                source = candidate
                point -= width
                if point < 0:
                    break
        return source


def _shares(weights: Sequence[float], temperature: float) -> tuple[float, ...]:
    powers = [weight ** (1 / temperature) for weight in weights]
    # Rounded, since powers differ in their last bits between machines, and all ranks have to draw alike.
    return tuple(round(power / sum(powers), 12) for power in powers)


def _check_phases(phases: Sequence[Phase], sources: Mapping[str, SampleStream]) -> None:
    if not phases or phases[0].start != 0 or phases[0].ramp != 0:
        raise UserError("the first phase of a mixture must have start = 0 and ramp = 0: there is nothing before it.")
    for phase in phases:
        if unknown := sorted(phase.weights.keys() - sources.keys()):
            raise UserError(f"weights for {', '.join(unknown)}; expected some of the sources {', '.join(sources)}.")
        if not all(isfinite(weight) and weight >= 0 for weight in phase.weights.values()) or not any(
            phase.weights.values()
        ):
            raise UserError(
                f"weights {dict(phase.weights)}; expected none below 0, and at least one above. Leave a source out to "
                "take nothing of it."
            )
    for phase, following in pairwise(phases):
        if phase.ramp < 0 or following.ramp < 0 or phase.start + phase.ramp > following.start:
            raise UserError(
                f"a phase from {phase.start} on with a ramp of {phase.ramp} is followed by one from {following.start} "
                "on; expected phases in order, each after the ramp of the one before. Change their starts."
            )
