"""Tests that a model computes the same in a distributed layout as in a single process."""

from d9d_loop.testing.layout import Layout as Layout
from d9d_loop.testing.layout import parse_layout as parse_layout
from d9d_loop.testing.oracle import Around as Around
from d9d_loop.testing.oracle import Experiment as Experiment
from d9d_loop.testing.oracle import assert_same_as_one_process as assert_same_as_one_process
from d9d_loop.testing.oracle import trace_layout as trace_layout
