"""State mappers for model checkpoints, and crash-safe training checkpoints, for PyTorch."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_state.checkpoint.local_tier import LocalTier as LocalTier
    from d9d_state.checkpoint.non_tensor_optimizer_state import non_tensor_optimizer_state as non_tensor_optimizer_state
    from d9d_state.checkpoint.non_tensor_optimizer_state import (
        set_non_tensor_optimizer_state as set_non_tensor_optimizer_state,
    )
    from d9d_state.checkpoint.retention import Retention as Retention
    from d9d_state.checkpoint.save_plan import check_saveable as check_saveable
    from d9d_state.checkpoint.store import CheckpointStore as CheckpointStore
    from d9d_state.checkpoint.tensors import check_same_model as check_same_model
    from d9d_state.checkpoint.tensors import model_tensors as model_tensors
    from d9d_state.checkpoint.tensors import optimizer_tensors as optimizer_tensors
    from d9d_state.checkpoint.tensors import prepare_optimizer_for_load as prepare_optimizer_for_load
    from d9d_state.errors import StateError as StateError
    from d9d_state.json_value import JsonValue as JsonValue
    from d9d_state.mapper.compose import parallel as parallel
    from d9d_state.mapper.compose import repeat as repeat
    from d9d_state.mapper.compose import scope as scope
    from d9d_state.mapper.compose import sequential as sequential
    from d9d_state.mapper.convert import cast as cast
    from d9d_state.mapper.convert import permute as permute
    from d9d_state.mapper.convert import transform as transform
    from d9d_state.mapper.convert import transpose as transpose
    from d9d_state.mapper.cut import narrow as narrow
    from d9d_state.mapper.cut import pad as pad
    from d9d_state.mapper.cut import select as select
    from d9d_state.mapper.dequantize import dequantize as dequantize
    from d9d_state.mapper.dequantize import dequantize_inputs as dequantize_inputs
    from d9d_state.mapper.fill import Destination as Destination
    from d9d_state.mapper.join import concat as concat
    from d9d_state.mapper.join import split as split
    from d9d_state.mapper.join import stack as stack
    from d9d_state.mapper.join import unstack as unstack
    from d9d_state.mapper.names import drop as drop
    from d9d_state.mapper.names import identity as identity
    from d9d_state.mapper.names import identity_of as identity_of
    from d9d_state.mapper.names import keep as keep
    from d9d_state.mapper.names import rename as rename
    from d9d_state.mapper.names import rename_all as rename_all
    from d9d_state.mapper.operation import Layout as Layout
    from d9d_state.mapper.operation import Local as Local
    from d9d_state.mapper.operation import Operation as Operation
    from d9d_state.mapper.operation import Piece as Piece
    from d9d_state.mapper.operation import Regional as Regional
    from d9d_state.mapper.operation import infer_on_meta as infer_on_meta
    from d9d_state.mapper.placement import distribute as distribute
    from d9d_state.mapper.placement import gather_full as gather_full
    from d9d_state.mapper.quantized import Fp8Blocks as Fp8Blocks
    from d9d_state.mapper.quantized import Int4Groups as Int4Groups
    from d9d_state.mapper.quantized import Mxfp4 as Mxfp4
    from d9d_state.mapper.reshape import reshape as reshape
    from d9d_state.mapper.state_mapper import StateMapper as StateMapper
    from d9d_state.mapper.state_mapper import leaf as leaf
    from d9d_state.model_convert import convert_model_state as convert_model_state
    from d9d_state.model_folder import ModelFolder as ModelFolder
    from d9d_state.model_load import load_model_state as load_model_state
    from d9d_state.model_read import read_model_state as read_model_state
    from d9d_state.model_save import save_model_state as save_model_state
    from d9d_state.model_stream import gathered_weights as gathered_weights
    from d9d_state.model_stream import weight_shards as weight_shards
    from d9d_state.rng import rng_state as rng_state
    from d9d_state.rng import set_rng_state as set_rng_state
    from d9d_state.tensor_info import TensorInfo as TensorInfo
else:
    __getattr__, __dir__ = lazy_exports(__name__)
