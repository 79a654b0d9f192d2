"""Command `d9d-report`, which compares runs in one HTML page."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from d9d_loop.cli_main import cli_main
from d9d_loop.report.run_folder import read_run
from d9d_loop.report.run_report import render_report


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: `d9d-report RUN... [--output FILE]`."""
    parser = argparse.ArgumentParser(prog="d9d-report", description="Compare the runs of jobs in one HTML page.")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="file to write; default: %(default)s")
    options = parser.parse_args(arguments)
    with cli_main():
        runs = [read_run(run) for run in options.runs]
        options.output.write_text(render_report(runs), encoding="utf-8")
        for run in runs:
            if run.history is not None:
                print(f"{run.name}: {run.history.describe()}")
        print(options.output)


if __name__ == "__main__":
    main()
