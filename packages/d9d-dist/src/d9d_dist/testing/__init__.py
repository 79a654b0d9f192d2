"""Tools to test distributed code on one machine, with real ranks and collectives in reused processes.

Public, so that users can test their own parallel code with them.
"""

from d9d_dist.testing.compare import Difference as Difference
from d9d_dist.testing.compare import assert_rounds_like as assert_rounds_like
from d9d_dist.testing.compare import assert_trees_close as assert_trees_close
from d9d_dist.testing.compare import differences as differences
from d9d_dist.testing.compare import full_gradients as full_gradients
from d9d_dist.testing.compare import full_parameters as full_parameters
from d9d_dist.testing.compare import full_tree as full_tree
from d9d_dist.testing.float64 import KeepFloat64 as KeepFloat64
from d9d_dist.testing.float64 import in_float64 as in_float64
from d9d_dist.testing.pool import Device as Device
from d9d_dist.testing.pool import RankError as RankError
from d9d_dist.testing.pool import RankPool as RankPool
from d9d_dist.testing.pool import accelerators_for as accelerators_for
from d9d_dist.testing.pool import run_ranks as run_ranks
from d9d_dist.testing.triton_interpreter import run_tests_interpreted as run_tests_interpreted
