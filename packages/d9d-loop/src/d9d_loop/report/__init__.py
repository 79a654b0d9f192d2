"""HTML report of runs: one self-contained page with curves, configuration and environment."""

from d9d_loop.report.run_folder import RunFolder, read_run
from d9d_loop.report.run_report import render_report, write_report

__all__ = ["RunFolder", "read_run", "render_report", "write_report"]
