"""Optimizers: subclasses of `torch.optim.Optimizer` for the parameters of a parallelized model.

Optimizer state consists of numbers and of DTensors with the placements of their parameters. So job checkpoints contain
it, and a job can resume on a different mesh.
"""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_loop.optimizers.adam import LocalAdam as LocalAdam
    from d9d_loop.optimizers.adam import LocalAdamW as LocalAdamW
    from d9d_loop.optimizers.averaging import Averaging as Averaging
    from d9d_loop.optimizers.averaging import evaluation_weights as evaluation_weights
    from d9d_loop.optimizers.ema import Ema as Ema
    from d9d_loop.optimizers.joined import JoinedOptimizer as JoinedOptimizer
    from d9d_loop.optimizers.lion import Lion as Lion
    from d9d_loop.optimizers.muon import Muon as Muon
    from d9d_loop.optimizers.muon import orthogonalize as orthogonalize
    from d9d_loop.optimizers.schedule_free import ScheduleFreeAdamW as ScheduleFreeAdamW
    from d9d_loop.optimizers.sgd import LocalSGD as LocalSGD
    from d9d_loop.optimizers.stochastic_adamw import StochasticAdamW as StochasticAdamW
    from d9d_loop.optimizers.weight_average import WeightAverage as WeightAverage
else:
    __getattr__, __dir__ = lazy_exports(__name__)
