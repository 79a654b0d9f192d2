"""Names of the preference losses, for configurations: does not import torch."""

from typing import Literal, TypeAlias

PreferenceKind: TypeAlias = Literal["sigmoid", "squared", "hinge"]
"""Function of the margin: as in DPO, IPO or SLiC."""
