"""Command `d9d-plan`: predict memory and time of a job on a cluster, without the cluster."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from d9d_dist import UserError
from d9d_dist.lazy_exports import paused_collection
from d9d_loop import planning
from d9d_loop.cli_main import cli_main
from d9d_loop.job_files import read_job
from d9d_loop.planning.hardware_spec import Hardware, hardware_names


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `d9d-plan FILE.toml --world-size N --hardware NAME [--search] [--html FILE] [--json] [--key VALUE ...]`.

    Configuration keys on the command line override the file, as in `d9d-train`, which reads the same files.
    Help does not import torch.
    """
    with cli_main(), paused_collection():
        words = list(sys.argv[1:] if arguments is None else arguments)
        options, rest = _parser().parse_known_args(words)
        if options.calibrate is not None:
            from d9d_loop.planning.calibration import calibrate  # noqa: PLC0415 - imports torch

            print(f"d9d: wrote {calibrate(options.calibrate)}")
            return
        if options.world_size is None or options.hardware is None:
            raise UserError(
                "got no --world-size or no --hardware; expected both: the number of devices, and one of "
                f"{', '.join(hardware_names())} or a TOML file."
            )
        hardware = Hardware.load(options.hardware)  # before the import of torch
        with redirect_stdout(sys.stderr) if options.json else nullcontext():  # the job's own messages are not JSON
            trainer, _ = read_job(rest, world_size=options.world_size)
            plan = planning.plan_cluster(
                trainer, world_size=options.world_size, hardware=hardware, search=options.search
            )
        if options.html is not None:
            from d9d_loop.planning.html_report import write_html  # noqa: PLC0415 - imports torch

            write_html(plan, options.html)
        print(json.dumps(plan.to_json(), indent=2) if options.json else planning.report(plan))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="d9d-plan", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--world-size", type=int, help="number of devices")
    parser.add_argument("--hardware", help=f"one of {', '.join(hardware_names())}, or a TOML file")
    parser.add_argument("--search", action="store_true", help="also rank other layouts")
    parser.add_argument("--html", type=Path, help="write an HTML report with plots to this file")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="measure this machine, and write its description"
    )
    return parser


if __name__ == "__main__":
    main()
