"""Host memory of `Engine.weights()` beyond the model, compared with the largest group of the state mapper.

    python packages/d9d-loop/benchmarks/hand_over_memory.py

Prints JSON: for each model and layout, and each rank, the peak of the resident memory above its value before
`weights()`, minus the largest group, in MiB. The first of two calls warms up the allocator and process groups. The
dense model has a tied head of 64 MiB. The sparse model has fused experts: the expert weights of a layer are one group.
"""

import argparse
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from d9d_dist import DistributedContext, StageInfo, parallelize_hsdp, parallelize_tensor
from d9d_dist.testing import RankPool
from d9d_loop import Engine, EngineConfig, Loss, ModelProvider, Task
from d9d_modules import Qwen3ForCausalLM, Qwen3Params, decoder_from_hugging_face, decoder_tensor_plan
from d9d_moe import Qwen3MoeForCausalLM, Qwen3MoeParams, parallelize_moe, sparse_from_hugging_face
from d9d_state import StateMapper

LAYOUTS = {
    "data_parallel_shard 2": {"data_parallel_shard": 2},
    "pipeline_parallel 2, tensor_parallel 2": {"pipeline_parallel": 2, "tensor_parallel": 2},
}
DENSE = Qwen3Params(
    vocab_size=16384,
    hidden_size=1024,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=4096,
    tie_word_embeddings=True,
)
SPARSE = Qwen3MoeParams.like(replace(DENSE, vocab_size=1024), num_experts=16, top_k=2, expert_intermediate_size=1024)


class Decoder(ModelProvider):
    """Dense or sparse decoder."""

    def __init__(self, kind: str) -> None:
        self.is_dense = kind == "dense"

    def build(self, stage: StageInfo) -> nn.Module:
        """Build a stage."""
        return Qwen3ForCausalLM(DENSE, stage) if self.is_dense else Qwen3MoeForCausalLM(SPARSE, stage)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        """Shard the model over all axes."""
        dense = ctx.mesh_for("dense")
        parallelize_tensor(model, dense["tp"], decoder_tensor_plan(model))
        parallelize_moe(model, ctx)
        axes = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
        for block in model.get_submodule("backbone.layers").children():
            parallelize_hsdp(block, axes, shard_axis="dp_cp_shard")
        parallelize_hsdp(model, axes, shard_axis="dp_cp_shard")

    def state_mapper(self, model: nn.Module) -> StateMapper:
        """Return the mapper from the Hugging Face names."""
        return decoder_from_hugging_face(DENSE) if self.is_dense else sparse_from_hugging_face(SPARSE)


class NextToken(Task):
    """Placeholder: nothing is trained."""

    def inputs(self, batch: Any) -> Any:
        """Raise, because the model is not called."""
        raise NotImplementedError

    def loss(self, outputs: Any, batch: Any) -> Loss:
        """Raise, because nothing is trained."""
        raise NotImplementedError


def main() -> None:
    """Measure, print JSON, and optionally write it."""
    parser = argparse.ArgumentParser(description="Host memory of Engine.weights().")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for kind in ("dense", "sparse"):
        for name, mesh in LAYOUTS.items():
            with tempfile.TemporaryDirectory() as folder, RankPool() as pool:
                ranks = pool.run(measure, kind, mesh, folder, world_size=math.prod(mesh.values()), timeout=600.0)
            found[f"{kind}, {name}"] = ranks
    text = json.dumps(found, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


def measure(kind: str, mesh: dict[str, int], folder: str) -> dict[str, float]:
    """Return the largest group of this rank's stage, and the peak of `weights()` beyond it, in MiB."""
    config = EngineConfig.model_validate({"run": {"folder": folder}, "mesh": mesh, "health": {"enabled": False}})
    provider = Decoder(kind)
    with Engine.open(config, model=provider, task=NextToken()) as engine:
        own: dict[str, Tensor] = dict(engine.model.named_parameters(remove_duplicate=False))
        groups = provider.state_mapper(engine.model).inverse().groups
        names = ({name.removeprefix("0.") for name in group.inputs} for group in groups)
        sizes = [sum(own[name].nbytes for name in group) for group in names if group <= own.keys()]
        for _ in range(2):
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
            before = _status("VmRSS")
            for _name, tensor in engine.weights():
                del tensor
        return {"largest_group": max(sizes) / 2**20, "beyond": (_status("VmHWM") - before - max(sizes)) / 2**20}


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split(f"{key}:")[1].split()[0]) << 10


if __name__ == "__main__":
    main()
