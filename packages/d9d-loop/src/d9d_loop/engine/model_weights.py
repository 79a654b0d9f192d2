"""Weights of an engine's model under their names on disk."""

from collections.abc import Iterator
from typing import final

from torch import Tensor, nn

from d9d_dist import DistributedContext, Region, UserError
from d9d_state import StateMapper, gathered_weights, model_tensors, weight_shards


@final
class ModelWeights:
    """Weights of this rank's stages, whole or as shards, through the inverse of a state mapper.

    Args:
        model: This rank's part of the model.
        mapper: Mapper from the weights on disk to those of the whole model; `None` if the names are equal.
        ctx: Distributed context.
    """

    def __init__(self, model: nn.Module, mapper: StateMapper | None, ctx: DistributedContext) -> None:
        self._model, self._mapper, self._ctx = model, mapper, ctx

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors; see `gathered_weights`. Collective.

        Raises:
            UserError: If the mapper has no inverse, or omits trained parameters.
        """
        return gathered_weights(self._model, self._inverse(), self._ctx)

    def shards(self) -> Iterator[tuple[str, Tensor, Region]]:
        """Yield this rank's shards; see `weight_shards`. No collectives. Raises as `gathered`."""
        self._inverse()
        return weight_shards(self._model, self._mapper)

    def _inverse(self) -> StateMapper | None:
        if self._mapper is None:
            return None
        self._refuse_omissions(self._mapper)
        try:
            return self._mapper.inverse()
        except ValueError as error:
            raise UserError(f"the state mapper of the model has no inverse: {error} Add an inverse.") from None

    def _refuse_omissions(self, mapper: StateMapper) -> None:
        """Raise `UserError` if the mapper only keeps trained parameters, such as those of adapters."""
        kept = {name for group in mapper.groups if not group.inputs for name in group.outputs}
        trained = {name.removeprefix("model.") for name in model_tensors(self._model, trainable_only=True)}
        omitted = sorted(kept & trained)
        if omitted:
            raise UserError(
                f"the weights on disk have no place for {len(omitted)} trained parameters, such as {omitted[0]}; "
                "expected all of them, because the weights would be those before training. Merge adapters first, or "
                "pass them on with save_adapters."
            )
