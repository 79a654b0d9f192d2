"""Tests that a model computes the same in a distributed layout as in a single process."""

from d9d_loop.testing.layout import Layout, parse_layout
from d9d_loop.testing.oracle import Around, Experiment, assert_same_as_one_process, trace_layout

__all__ = ["Around", "Experiment", "Layout", "assert_same_as_one_process", "parse_layout", "trace_layout"]
