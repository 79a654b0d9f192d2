"""Pipeline stage of a model: models read it to build only the layers of one stage."""

from dataclasses import dataclass

from d9d_dist.errors import UserError


@dataclass(frozen=True, slots=True)
class StageInfo:
    """Place of one pipeline stage in a model: its index, from 0, and the number of stages."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        """Raise `ValueError` if `index` is not in `range(count)`."""
        if not 0 <= self.index < self.count:
            raise ValueError(f"stage index = {self.index}; expected 0 <= index < count = {self.count}.")

    @property
    def is_first(self) -> bool:
        """True if this stage holds the input side (the token embedding)."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if this stage holds the output side (the final norm and the head)."""
        return self.index == self.count - 1

    def layers(self, num_layers: int, *, virtual_before: int = 0, virtual_after: int = 0) -> range:
        """Return the global indices of this stage's layers: contiguous and balanced; early stages take the remainder.

        Args:
            num_layers: Number of layers of the whole model.
            virtual_before: Cost of the embedding on the first stage, in layers.
            virtual_after: Cost of the final norm and head on the last stage, in layers.

        Raises:
            UserError: If there are fewer layers, including virtual ones, than stages.
        """
        total = num_layers + virtual_before + virtual_after
        if total < self.count:
            raise UserError(
                f"{num_layers} layers (+ {virtual_before + virtual_after} virtual) are too few for {self.count} "
                f"pipeline stages; use at most {total} stages."
            )
        size, larger = divmod(total, self.count)
        start = self.index * size + min(self.index, larger)
        stop = start + size + (self.index < larger)
        return range(min(max(start - virtual_before, 0), num_layers), min(max(stop - virtual_before, 0), num_layers))
