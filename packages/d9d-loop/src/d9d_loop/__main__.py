"""Command `d9d-train` (`python -m d9d_loop` under torchrun), which runs the training job of a configuration file."""

import sys
from collections.abc import Sequence
from pathlib import Path

from d9d_dist import UserError, read_launch
from d9d_loop import planning
from d9d_loop.cli_main import cli_main
from d9d_loop.job_files import read_job
from d9d_loop.jobs.starter_files import STARTERS, write_starter


def main() -> None:
    """Run training: `d9d-train FILE.toml [--section.key VALUE ...]`.

    A file with the key `job` describes a text job (`TextJobConfig`). Other files are presets, which name their model,
    task and data by import path. Import paths are also resolved in the current folder and in the preset's folder.
    `--init JOB` writes a commented starter file; `--init` without a job lists the jobs. Help and messages about invalid
    keys are printed without importing torch.
    """
    words = sys.argv[1:]
    with cli_main():
        if "--init" in words:
            _init(words[words.index("--init") + 1 :])
        else:
            trainer, config = read_job(words, world_size=read_launch().world_size)
            if config.plan.hardware is not None:
                planning.warn_if_too_large(trainer, hardware=config.plan.hardware)
            print(trainer.train())


def _init(words: Sequence[str]) -> None:
    if not words:
        for job, text in STARTERS.items():
            print(f"d9d-train --init {job:<9} {text.splitlines()[0].removeprefix('# ').partition(':')[0]}")
        return
    path = write_starter(words[0], Path.cwd())
    print(f"wrote {path.name}. Edit it, then run: d9d-train {path.name}")


def import_main() -> None:
    """Import a checkpoint of another library into a new run: `d9d-import CHECKPOINT FILE.toml [--key VALUE ...]`."""
    with cli_main():
        if {"-h", "--help"} & {*sys.argv[1:2]}:
            print(import_main.__doc__)
            return
        if len(sys.argv) <= 2:
            raise UserError("expected d9d-import CHECKPOINT FILE.toml [--key VALUE ...].")
        trainer, _ = read_job(sys.argv[2:])
        print(f"d9d: imported {sys.argv[1]}, step {trainer.import_checkpoint(sys.argv[1]).steps}.")


if __name__ == "__main__":
    main()
