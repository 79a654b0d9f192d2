"""Kinds of preference losses, without imports, for configurations."""

from typing import Literal, TypeAlias

PreferenceKind: TypeAlias = Literal["sigmoid", "squared", "hinge"]
"""Function of the margin: as in DPO, IPO or SLiC."""
