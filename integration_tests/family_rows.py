"""Models of the oracle's rows by the class of their hyperparameters, which the families of checkpoints name."""

from oracle_decoders import FAMILIES, MORE_FAMILIES, DecoderProvider
from test_sparse_family_rows import DENSE as OTHER_FAMILIES
from test_sparse_family_rows import FAMILIES as SPARSE_FAMILIES
from test_sparse_family_rows import family_params

from d9d_moe import Qwen3MoeParams

# Of several models with one class, the first one is kept.
DENSE: dict[type, str] = {
    Qwen3MoeParams: "moe",
    **{type(DecoderProvider(model=name).params): name for name in reversed((*FAMILIES, *MORE_FAMILIES))},
}
"""Models of the grids of `oracle.py`."""

SPARSE: dict[type, str] = {type(family_params(name, 2)): name for name in reversed((*SPARSE_FAMILIES, *OTHER_FAMILIES))}
"""Families of `test_sparse_family_rows.py`."""
