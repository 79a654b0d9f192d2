"""Checks shared by training and inference jobs, run before a process group starts or a file is written."""

import os
from pathlib import Path

from d9d_dist import MeshConfig, UserError
from d9d_loop.data.batches import Samples
from d9d_loop.model.built_model import BuiltModel
from d9d_loop.task import BatchTask
from d9d_state import StateMapper, check_model_state


def check_degrees(mesh: MeshConfig, task: BatchTask) -> None:
    """Check that the task overrides `split_sequence` if the mesh has several context-parallel ranks.

    Raises:
        UserError: If the task does not override it.
    """
    cuts = mesh.context_parallel_shard * mesh.context_parallel_replicate > 1
    if cuts and not _says_how_to_split(task):
        task_name = type(task).__name__
        raise UserError(
            f"the mesh has context-parallel ranks, but {task_name} cannot split a batch over them; expected a "
            f"method {task_name}.split_sequence(batch, split). Implement it, or set the context-parallel degrees to 1."
        )


def _says_how_to_split(task: BatchTask) -> bool:
    return any("split_sequence" in vars(kind) for kind in type(task).mro() if kind is not BatchTask)


def check_data(data: Samples, what: str) -> None:
    """Check that a dataset has at least one sample.

    Args:
        data: The dataset.
        what: Plural noun for the dataset in the error message, e.g. "evaluation data".

    Raises:
        UserError: If the dataset is empty.
    """
    if len(data) == 0:
        raise UserError(f"the {what} are empty; expected at least one sample. Check the path of the data.")


def check_writable(folder: Path) -> None:
    """Check that a folder is writable, or can be created. Nothing is created.

    Raises:
        UserError: If the folder, or its nearest existing parent, is a file or not writable.
    """
    existing = folder.absolute()
    # os.access returns False if a parent folder is not searchable; Path.exists would raise.
    while not os.access(existing, os.F_OK):
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "is not writable" if existing.is_dir() else "is a file, not a folder"
        raise UserError(
            f"run folder {folder}: {existing} {reason}. Choose another folder with --run.folder, or change permissions."
        )


def check_weights(name: str, folder: Path, mapper: StateMapper | None, built: BuiltModel) -> None:
    """Check that the weights in a folder match the model's names and shapes. No tensor data is read.

    Args:
        name: Configuration key that names the folder, for the error message.
        folder: Folder with safetensors files.
        mapper: State mapper from the folder's weights to the model's; `None` if the names are the same.
        built: The whole model.

    Raises:
        UserError: If weights are missing, unexpected, or have another shape. Also if a parameter was built without
            values and the folder has none for it.
    """
    try:
        check_model_state(built.module, folder, mapper)
    except UserError as error:
        raise UserError(f"{name} = {folder}: {error}") from None
    kept = {output for group in mapper.groups if not group.inputs for output in group.outputs} if mapper else set()
    if empty := sorted(kept & built.without_values):
        raise UserError(
            f"{name} = {folder} has no values for {', '.join(empty)}, and the build does not set them; expected "
            "all weights of the model. Choose a folder with weights of this model."
        )
