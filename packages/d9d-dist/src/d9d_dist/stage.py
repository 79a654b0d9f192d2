"""Which part of a model a rank builds: models ask it for their layers, so each pipeline stage builds only its own."""

from dataclasses import dataclass

from d9d_dist.errors import UserError


@dataclass(frozen=True, slots=True)
class StageInfo:
    """The place of one pipeline stage among all stages of a model.

    Attributes:
        index: This stage, counted from 0.
        count: Number of stages of the whole model; 1 means that the model is not split.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        """Refuse an index outside the stages.

        Raises:
            ValueError: If `index` is not in `range(count)`.
        """
        if not 0 <= self.index < self.count:
            raise ValueError(f"stage index = {self.index}; expected 0 <= index < count = {self.count}.")

    @property
    def is_first(self) -> bool:
        """Whether this stage holds the input side (the token embedding)."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage holds the output side (the final norm and the head)."""
        return self.index == self.count - 1

    def layers(self, num_layers: int, *, virtual_before: int = 0, virtual_after: int = 0) -> range:
        """The global indices of this stage's layers: contiguous, as even as possible, early stages take what is over.

        Args:
            num_layers: Number of layers of the whole model.
            virtual_before: Layers' worth of work that the embedding counts for on the first stage.
            virtual_after: Layers' worth of work that the final norm and head count for on the last stage.

        Returns:
            A range within `range(num_layers)`; the ranges of all stages join to exactly that.

        Raises:
            UserError: If there are fewer layers, virtual ones included, than stages.
        """
        total = num_layers + virtual_before + virtual_after
        if total < self.count:
            raise UserError(
                f"{num_layers} layers (+ {virtual_before + virtual_after} virtual) cannot fill {self.count} pipeline "
                f"stages; use at most {total} stages."
            )
        size, larger = divmod(total, self.count)
        start = self.index * size + min(self.index, larger)
        stop = start + size + (self.index < larger)
        return range(
            min(max(start - virtual_before, 0), num_layers),
            min(max(stop - virtual_before, 0), num_layers),
        )
