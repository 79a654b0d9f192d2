"""Search for the missing ranks of a hang, from the location of each rank: step, collective and line."""

from collections import Counter
from collections.abc import Collection, Mapping

from d9d_dist.consensus import name_ranks
from d9d_loop.resilience.rank_place import RankPlace

_SHOWN = 8


def describe_hang(
    places: Mapping[int, RankPlace | None], *, seconds: float, states: Mapping[int, str] | None = None
) -> str:
    """Return a report of the missing ranks and the location of each rank.

    Args:
        places: Location of each rank; `None` for a rank that does not answer.
        seconds: Time without progress, in seconds.
        states: Known process states by rank, such as "its process 4711 on node-3 is stopped".
    """
    states = states or {}
    lines = [f"no progress for {seconds:.1f} s."]
    if len(places) == 1:
        return "\n".join(lines + [f"The only rank is {place.describe()}." for place in places.values() if place])
    missing = missing_ranks(places)
    for rank in missing[:_SHOWN]:
        place = places[rank]
        if place is not None:
            lines.append(f"Rank {rank} is missing: it is {place.describe()}.")
        else:
            why = states.get(
                rank, "its process is stopped or holds the GIL, or its host is down or cut off from the network"
            )
            lines.append(f"Rank {rank} is missing: it does not answer; {why}.")
    if not missing:
        lines.append(
            "All ranks are at the same place: none is missing, so the network between the hosts may be at fault."
        )
    lines += _waiting({rank: place for rank, place in places.items() if place is not None and rank not in missing})
    return "\n".join(lines)


def missing_ranks(places: Mapping[int, RankPlace | None]) -> list[int]:
    """Return the ranks that the other ranks wait for; empty if all ranks are at the same location.

    The first of these rules that finds any ranks applies:

    1. Ranks that do not answer.
    2. Ranks at an earlier step than the latest.
    3. Ranks in no collective, while other ranks are in a collective.
    4. Ranks at the location with the fewest ranks.
    """
    known = {rank: place for rank, place in places.items() if place is not None}
    silent = [rank for rank, place in places.items() if place is None]
    if silent or not known:
        return silent
    newest = max(place.step for place in known.values())
    if behind := [rank for rank, place in known.items() if place.step < newest]:
        return behind
    if outside := _part(known, [rank for rank, place in known.items() if place.collective is None]):
        return outside
    counts = Counter((place.collective, place.at) for place in known.values())
    fewest = min(counts.values())
    return _part(known, [rank for rank, place in known.items() if counts[place.collective, place.at] == fewest])


def _part(known: Collection[int], ranks: list[int]) -> list[int]:
    """Return `ranks`, or an empty list if `ranks` contains all known ranks, so that no rank stands out."""
    return ranks if len(ranks) < len(known) else []


def _waiting(places: Mapping[int, RankPlace]) -> list[str]:
    ranks_by_place: dict[str, list[int]] = {}
    for rank, place in places.items():
        ranks_by_place.setdefault(place.describe(), []).append(rank)
    return [
        f"{name_ranks(ranks).capitalize()} wait{'' if ranks[1:] else 's'}: {place}."
        for place, ranks in ranks_by_place.items()
    ]
