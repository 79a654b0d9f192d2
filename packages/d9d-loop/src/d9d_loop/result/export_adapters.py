"""Command that merges adapters into their base model, or exports a checkpoint: d9d-export RUN_OR_ADAPTERS."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from d9d_dist import UserError
from d9d_loop.cli_main import cli_main
from d9d_loop.data.text_tokenizer import read_json
from d9d_loop.result.adapted_base import ADAPTER_CONFIG, add_base_options, find_base, save_merged


def main(arguments: Sequence[str] | None = None) -> None:
    """Merge the adapters and print into which weights they were merged, or export a checkpoint with `--step`.

    Raises:
        UserError: If there are no adapters, their base is missing, or the output exists. With `--step`, if there is no
            such checkpoint, or the run is that of a script.
    """
    parser = argparse.ArgumentParser(
        prog="d9d-export",
        description="With --step, export a checkpoint of a run of d9d-train, in one process or under torchrun. "
        "Otherwise, merge the adapters of a run into their base model, and export the model in Hugging Face layout, "
        "with its tokenizer. Adapters of a quantized base are merged into its dequantized weights, which were trained "
        "on, or with --base-weights dense into the weights of the base's folder.",
    )
    parser.add_argument("path", help="folder of a run that exported only adapters, or of adapters")
    parser.add_argument(
        "--output", type=Path, help="folder to write; default: export/ of the run, or a folder of the step"
    )
    parser.add_argument("--step", help="step of a checkpoint that the run keeps, or best: export it to OUTPUT/export")
    add_base_options(parser)
    options = parser.parse_args(arguments)
    if options.step is not None:
        _export_step(Path(options.path), options.step, options.output)
        return
    from d9d_loop.jobs.text_export import copy_tokenizer  # noqa: PLC0415 - help is printed without torch
    from d9d_loop.model.export_notes import print_export_notes  # noqa: PLC0415
    from d9d_loop.result.loaded_result import (  # noqa: PLC0415 - imports torch
        find_export,
        require_transformers,
        tokenizer_folder,
    )

    require_transformers()
    folder = find_export(Path(options.path))
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{folder} is a whole model; expected adapters to merge. Use it as it is, or pass the folder adapters/ of "
            "the run and --output."
        )
    source = find_base(folder, base=options.base, weights=options.base_weights)
    output: Path = options.output or folder.parent / "export"
    if output.exists():
        raise UserError(f"{output} exists; expected a new folder. Pass another one: --output FOLDER.")
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_merged(source, partial)
    copy_tokenizer(tokenizer_folder(folder, source), partial)
    if (folder / "generation_config.json").is_file():
        shutil.copy(folder / "generation_config.json", partial)
    partial.replace(output)
    print(f"d9d: wrote {output}: merged {source}.")
    print_export_notes(output)


def _export_step(run: Path, step: str, output: Path | None) -> None:
    """Export a checkpoint of a run to `output/export`, by default `RUN/step-N/export`."""
    if step != "best" and not step.isdecimal():
        raise UserError(f"--step {step}; expected the number of a step, or best.")
    file = run.resolve() / "config.json"
    config = read_json(file)
    if not ({"job", "task"} & config.keys()):
        raise UserError(
            f"{run} is not a run of d9d-train, whose config.json names the model and the task; expected one. For a run "
            "of a script, call Trainer.export(folder, step=...) in the script."
        )
    from d9d_loop.job_files import read_job  # noqa: PLC0415 - help is printed without torch

    # The folder may have moved. The components of a preset are imported from the current folder.
    words = [str(file), "--run.folder", str(file.parent.parent), "--run.name", file.parent.name]
    trainer, _ = read_job(words, reads_data=False)
    result = trainer.export(output or run / f"step-{step}", step=None if step == "best" else int(step))
    print(f"d9d: wrote {result.run_dir}.")


run = cli_main()(main)
"""Entry point of `d9d-export`."""


if __name__ == "__main__":
    run()
