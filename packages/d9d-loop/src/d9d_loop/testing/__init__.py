"""The oracle: proves that a layout of your own model computes what one process computes."""

from d9d_loop.testing.layout import Layout, parse_layout
from d9d_loop.testing.oracle import Around, Experiment, assert_same_as_one_process, trace_layout

__all__ = ["Around", "Experiment", "Layout", "assert_same_as_one_process", "parse_layout", "trace_layout"]
