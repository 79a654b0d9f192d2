"""Optimizers: subclasses of `torch.optim.Optimizer` for the parameters of a parallelized model.

Optimizer state consists of numbers and of DTensors with the placements of their parameters. So job checkpoints contain
it, and a job can resume on a different mesh.
"""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_loop.optimizers.adam import LocalAdam, LocalAdamW
    from d9d_loop.optimizers.averaging import Averaging, evaluation_weights
    from d9d_loop.optimizers.joined import JoinedOptimizer
    from d9d_loop.optimizers.lion import Lion
    from d9d_loop.optimizers.muon import Muon, orthogonalize
    from d9d_loop.optimizers.schedule_free import ScheduleFreeAdamW
    from d9d_loop.optimizers.sgd import LocalSGD
    from d9d_loop.optimizers.stochastic_adamw import StochasticAdamW
    from d9d_loop.optimizers.stochastic_copy import stochastic_copy_
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "Averaging",
    "JoinedOptimizer",
    "Lion",
    "LocalAdam",
    "LocalAdamW",
    "LocalSGD",
    "Muon",
    "ScheduleFreeAdamW",
    "StochasticAdamW",
    "evaluation_weights",
    "orthogonalize",
    "stochastic_copy_",
]
