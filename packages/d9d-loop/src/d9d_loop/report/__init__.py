"""HTML report of runs: one self-contained page with curves, configuration and environment."""

from d9d_loop.report.run_folder import RunFolder as RunFolder
from d9d_loop.report.run_folder import read_run as read_run
from d9d_loop.report.run_report import render_report as render_report
from d9d_loop.report.run_report import write_report as write_report
