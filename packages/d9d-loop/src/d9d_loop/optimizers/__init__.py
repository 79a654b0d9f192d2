"""The optimizers themselves: plain `torch.optim.Optimizer`s over the parameters of a parallelised model.

Each keeps its state as DTensors that are placed like their parameters, or as numbers, so that job checkpoints hold it
and another mesh can continue from it.
"""

from d9d_loop.optimizers.adam import LocalAdam, LocalAdamW
from d9d_loop.optimizers.evaluation_weights import Averaging, evaluation_weights
from d9d_loop.optimizers.joined import JoinedOptimizer
from d9d_loop.optimizers.lion import Lion
from d9d_loop.optimizers.muon import Muon, orthogonalize
from d9d_loop.optimizers.schedule_free import ScheduleFreeAdamW
from d9d_loop.optimizers.sgd import LocalSGD
from d9d_loop.optimizers.stochastic_adamw import StochasticAdamW
from d9d_loop.optimizers.stochastic_copy import stochastic_copy_

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
