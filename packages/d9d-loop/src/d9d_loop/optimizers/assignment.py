"""Assignment of each parameter to exactly one optimizer group, by name pattern and number of dims."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from d9d_dist import UserError

if TYPE_CHECKING:
    from torch import Tensor

Named: TypeAlias = "list[tuple[str, Tensor]]"
"""(name, parameter) pairs."""

Dims: TypeAlias = Literal["any", "matrices", "vectors"]
"""Filter by number of dims: `any`, `matrices` (two or more) or `vectors` (fewer than two)."""

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Selector:
    """Parameter filter: a regular expression searched in the name, and the number of dims."""

    pattern: str
    of: Dims

    def __str__(self) -> str:
        return f"pattern = {self.pattern!r}" + ("" if self.of == "any" else f" of {self.of}")

    def chooses(self, name: str, parameter: "Tensor") -> bool:
        """Return True if the selector matches the parameter."""
        fits = self.of == "any" or (self.of == "matrices") == is_matrix(parameter)
        return fits and re.search(self.pattern, name) is not None


def is_matrix(parameter: "Tensor") -> bool:
    """Return True for a matrix or a stack of matrices; False for norm weights, biases and scalars."""
    return parameter.ndim >= 2


def assign(named: Named, selectors: Sequence[Selector], *, whole: bool = True) -> list[Named]:
    """Assign each parameter to the first selector that matches it.

    Return the parameters that match no selector, then the parameters of each selector in order. With `whole`, a
    selector without parameters raises `UserError`; a pipeline stage may have none.
    """
    found: list[Named] = [[] for _ in (None, *selectors)]
    for name, parameter in named:
        chosen = (number for number, each in enumerate(selectors, 1) if each.chooses(name, parameter))
        found[next(chosen, 0)].append((name, parameter))
    for number, selector in enumerate(selectors, 1):
        if whole and not found[number]:
            raise UserError(_explain(named, selector))
    return found


def _explain(named: Named, selector: Selector) -> str:
    if any(selector.chooses(name, parameter) for name, parameter in named):
        return (
            f"the optimizer's group with {selector} gets no parameter, because earlier groups match all of them; "
            "expected at least one. Move it before them, or remove it."
        )
    names = [name for name, _ in named]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"the optimizer's group with {selector} matches no trainable parameter; expected at least one of "
        f"{', '.join(names[:_SHOWN])}{more}. Correct the pattern, which is searched in these names, or remove the "
        "group."
    )
