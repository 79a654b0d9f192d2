"""State mappers for model checkpoints, and crash-safe training checkpoints, for PyTorch."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_state.checkpoint.info import CheckpointInfo
    from d9d_state.checkpoint.local_tier import LocalTier
    from d9d_state.checkpoint.non_tensor_optimizer_state import (
        group_values,
        non_tensor_optimizer_state,
        set_non_tensor_optimizer_state,
    )
    from d9d_state.checkpoint.retention import Retention
    from d9d_state.checkpoint.store import CheckpointStore
    from d9d_state.checkpoint.tensors import (
        check_same_model,
        model_tensors,
        optimizer_tensors,
        prepare_optimizer_for_load,
    )
    from d9d_state.errors import StateError
    from d9d_state.folder_lock import locked_folder
    from d9d_state.json_value import JsonValue
    from d9d_state.mapper.compose import parallel, repeat, scope, sequential
    from d9d_state.mapper.convert import cast, permute, transform, transpose
    from d9d_state.mapper.cut import narrow, pad, select
    from d9d_state.mapper.dequantize import dequantize, dequantize_inputs
    from d9d_state.mapper.fill import Destination, TensorSource
    from d9d_state.mapper.graph import StateGroup
    from d9d_state.mapper.join import concat, split, stack, unstack
    from d9d_state.mapper.names import drop, identity, identity_of, keep, rename, rename_all
    from d9d_state.mapper.operation import Constant, Layout, Local, Operation, Piece, Regional, infer_on_meta
    from d9d_state.mapper.placement import distribute, gather_full
    from d9d_state.mapper.quantized import BlockScaled, Fp8Blocks, Int4Groups, Mxfp4
    from d9d_state.mapper.reshape import reshape
    from d9d_state.mapper.state_mapper import StateMapper, leaf
    from d9d_state.model_convert import convert_model_state
    from d9d_state.model_folder import ModelFolder
    from d9d_state.model_load import check_model_state, load_model_state
    from d9d_state.model_read import read_model_state
    from d9d_state.model_save import save_model_state
    from d9d_state.model_stream import gathered_weights, weight_shards
    from d9d_state.rng import rng_state, set_rng_state
    from d9d_state.tensor_info import TensorInfo
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "BlockScaled",
    "CheckpointInfo",
    "CheckpointStore",
    "Constant",
    "Destination",
    "Fp8Blocks",
    "Int4Groups",
    "JsonValue",
    "Layout",
    "Local",
    "LocalTier",
    "ModelFolder",
    "Mxfp4",
    "Operation",
    "Piece",
    "Regional",
    "Retention",
    "StateError",
    "StateGroup",
    "StateMapper",
    "TensorInfo",
    "TensorSource",
    "cast",
    "check_model_state",
    "check_same_model",
    "concat",
    "convert_model_state",
    "dequantize",
    "dequantize_inputs",
    "distribute",
    "drop",
    "gather_full",
    "gathered_weights",
    "group_values",
    "identity",
    "identity_of",
    "infer_on_meta",
    "keep",
    "leaf",
    "load_model_state",
    "locked_folder",
    "model_tensors",
    "narrow",
    "non_tensor_optimizer_state",
    "optimizer_tensors",
    "pad",
    "parallel",
    "permute",
    "prepare_optimizer_for_load",
    "read_model_state",
    "rename",
    "rename_all",
    "repeat",
    "reshape",
    "rng_state",
    "save_model_state",
    "scope",
    "select",
    "sequential",
    "set_non_tensor_optimizer_state",
    "set_rng_state",
    "split",
    "stack",
    "transform",
    "transpose",
    "unstack",
    "weight_shards",
]
