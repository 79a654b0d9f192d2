"""Checkpoints as graphs, and job checkpoints that survive a kill, for PyTorch."""

from d9d_state.checkpoint.info import CheckpointInfo
from d9d_state.checkpoint.store import CheckpointStore
from d9d_state.checkpoint.tensors import (
    check_same_model,
    model_tensors,
    optimizer_tensors,
    prepare_optimizer_for_load,
)
from d9d_state.errors import StateError
from d9d_state.json_value import JsonValue
from d9d_state.mapper.compose import parallel, repeat, scope, sequential
from d9d_state.mapper.convert import cast, transform, transpose
from d9d_state.mapper.graph import Operation, StateGroup, StateMapper
from d9d_state.mapper.join import concat, split, stack, unstack
from d9d_state.mapper.names import drop, identity, identity_of, keep, rename
from d9d_state.model_folder import ModelFolder
from d9d_state.model_load import load_model_state
from d9d_state.model_save import save_model_state
from d9d_state.rng import rng_state, set_rng_state
from d9d_state.tensor_info import TensorInfo

__all__ = [
    "CheckpointInfo",
    "CheckpointStore",
    "JsonValue",
    "ModelFolder",
    "Operation",
    "StateError",
    "StateGroup",
    "StateMapper",
    "TensorInfo",
    "cast",
    "check_same_model",
    "concat",
    "drop",
    "identity",
    "identity_of",
    "keep",
    "load_model_state",
    "model_tensors",
    "optimizer_tensors",
    "parallel",
    "prepare_optimizer_for_load",
    "rename",
    "repeat",
    "rng_state",
    "save_model_state",
    "scope",
    "sequential",
    "set_rng_state",
    "split",
    "stack",
    "transform",
    "transpose",
    "unstack",
]
