"""Command `d9d-train` (`python -m d9d_loop` under torchrun), which runs the training job of a configuration file."""

import sys
from collections.abc import Sequence
from pathlib import Path

import d9d_loop
from d9d_dist import UserError
from d9d_loop import jobs
from d9d_loop.cli_main import cli_main
from d9d_loop.config.config_file import read_config_file
from d9d_loop.config.config_source import split_words
from d9d_loop.config.preset import PresetConfig, look_beside_preset
from d9d_loop.jobs.job_config import TextJobConfig
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
            print(read_trainer(words).train())


def read_trainer(words: Sequence[str]) -> "d9d_loop.Trainer":
    """Build the Trainer of the file and the overrides on a command line: a job on text, or a preset."""
    if _is_text_job(words):
        text_config = TextJobConfig.from_cli(arguments=words)  # its errors come before the import of torch
        return jobs.text_trainer(text_config)
    config = PresetConfig.from_cli(arguments=words)
    look_beside_preset(words)
    return d9d_loop.preset_trainer(config)


def _init(words: Sequence[str]) -> None:
    if not words:
        for job, text in STARTERS.items():
            print(f"d9d-train --init {job:<9} {text.splitlines()[0].removeprefix('# ').partition(':')[0]}")
        return
    path = write_starter(words[0], Path.cwd())
    print(f"wrote {path.name}. Edit it, then run: d9d-train {path.name}")


def _is_text_job(words: Sequence[str]) -> bool:
    if "--help" in words or "-h" in words:
        files = [word for word in words if not word.startswith("-") and Path(word).is_file()]
        return bool(files) and "job" in read_config_file(files[0])
    if "--schema" in words:
        return False
    file, overrides = split_words(words)
    if file is None:
        raise UserError(
            "no configuration file; expected d9d-train FILE.toml. d9d-train --init lists files to start from."
        )
    return "job" in read_config_file(file) or any(key == "job" for key, _ in overrides)


if __name__ == "__main__":
    main()
