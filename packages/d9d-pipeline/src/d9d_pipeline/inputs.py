"""Inputs of a pipeline for one microbatch."""

from typing import Any, final


@final
class Inputs:
    """Inputs of a pipeline for one microbatch; every rank of the pipeline passes the same inputs.

    Attributes:
        first: Positional arguments of the first stage. Later stages get the output of the previous stage instead.
        shared: Keyword arguments of every stage, such as position ids, masks or labels.
    """

    __slots__ = ("first", "shared")

    def __init__(self, *first: Any, **shared: Any) -> None:
        self.first = first
        self.shared = shared
