"""Weights of an engine's model under their names on disk."""

from collections.abc import Callable, Iterator
from typing import TypeVar, final

from torch import Tensor, nn

from d9d_dist import DistributedContext, Region, UserError
from d9d_loop.model.disk_mapper import disk_mapper
from d9d_state import StateMapper, gathered_weights, weight_shards

W = TypeVar("W")


@final
class ModelWeights:
    """Weights of this rank's stages, whole or as shards, through the inverse of a state mapper.

    Args:
        model: This rank's part of the model.
        mapper: Mapper from the weights on disk to those of the whole model; `None` if the names are equal.
        ctx: Distributed context.
        version: Function that returns another value after each change of the weights.
    """

    def __init__(
        self, model: nn.Module, mapper: StateMapper | None, ctx: DistributedContext, *, version: Callable[[], object]
    ) -> None:
        self._model, self._mapper, self._ctx, self._version = model, mapper, ctx, version

    def gathered(self, *, base_only: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors; see `gathered_weights` and `disk_mapper`. Collective."""
        mapper = disk_mapper(self._mapper, self._model, base_only=base_only)
        return self._unchanged(gathered_weights(self._model, mapper, self._ctx))

    def shards(self, *, base_only: bool) -> Iterator[tuple[str, Tensor, Region]]:
        """Yield this rank's shards; see `weight_shards` and `disk_mapper`. No collectives."""
        disk_mapper(self._mapper, self._model, base_only=base_only)
        return self._unchanged(weight_shards(self._model, self._mapper))

    def _unchanged(self, weights: Iterator[W]) -> Iterator[W]:
        """Yield weights; raise `UserError` if the weights change during the iteration."""
        version = self._version()
        for each in weights:
            yield each
            del each  # this view may keep its group in memory while the next one is gathered
            if self._version() != version:
                raise UserError(
                    "the weights changed while weights() was iterated, so the result would mix two steps; expected no "
                    "step(), offload() or reference() during the iteration. Consume the iterator first."
                )
