"""Load-balanced distribution of a mapper's groups over workers."""

import heapq
from collections.abc import Mapping, Sequence

from d9d_state.mapper.graph import Component


def deal(
    components: Sequence[Component], num_shards: int, index: int, num_bytes: Mapping[str, int] | None
) -> list[Component]:
    """Return the components of one worker, in the order of the graph; see `StateMapper.shard`.

    Greedy: the largest component goes first, to the worker with the smallest load. The largest load is at most 4/3 of
    the optimum (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).
    """
    if not 0 <= index < num_shards:
        raise ValueError(f"got index = {index}, num_shards = {num_shards}; expected 0 <= index < num_shards.")
    weights = [_weight(component, num_bytes) for component in components]
    loads = [(0, 0, worker) for worker in range(num_shards)]
    mine: list[int] = []
    for position in sorted(range(len(components)), key=lambda position: -weights[position]):
        load, count, worker = loads[0]
        heapq.heapreplace(loads, (load + weights[position], count + 1, worker))
        if worker == index:
            mine.append(position)
    return [components[position] for position in sorted(mine)]


def _weight(component: Component, num_bytes: Mapping[str, int] | None) -> int:
    names = component.group.inputs
    if num_bytes is None:
        return len(names)
    absent = [name for name in names if name not in num_bytes]
    if absent:
        raise ValueError(f"num_bytes lacks {', '.join(absent)}; expected the size of every input of the mapper.")
    return sum(num_bytes[name] for name in names)
