"""Jobs with a folder of `transformers` have the plan of d9d's own model of the same family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from d9d_dist import ContextSplit
from d9d_loop import Loss, Task, Trainer, TrainerConfig, hugging_face_model, pretrained_model
from d9d_loop.planning import ClusterPlan, plan_cluster
from d9d_pipeline import Inputs

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LENGTH = 128


class NextToken(Task):
    """Predicts the next token. d9d's own models take the ids as positional argument, and return the logits."""

    def __init__(self, *, is_own: bool) -> None:
        self.is_own = is_own

    def inputs(self, batch: dict[str, Tensor]) -> Any:
        ids, positions = batch["input_ids"], batch["position_ids"]
        return Inputs(ids, position_ids=positions) if self.is_own else {"input_ids": ids}

    def split_sequence(self, batch: dict[str, Tensor], split: ContextSplit) -> dict[str, Any]:
        return split.split(batch)

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Loss:
        logits = outputs if self.is_own else outputs.logits
        ids = batch["input_ids"]
        return Loss(torch.nn.functional.cross_entropy(logits.mT, ids, reduction="sum"), weight=ids.numel())


def plan(folder: Path, mesh: dict[str, int], *, is_own: bool) -> ClusterPlan:
    settings = {"steps": 2, "batch": {"global_size": 16, "microbatch_size": 1}, "run": {"folder": folder / "run"}}
    trainer = Trainer(
        TrainerConfig.model_validate({**settings, "mesh": mesh}),
        model=pretrained_model(folder) if is_own else hugging_face_model(folder, dtype=torch.float32),
        data=[{"input_ids": torch.arange(LENGTH), "position_ids": torch.arange(LENGTH)}] * 16,
        task=NextToken(is_own=is_own),
    )
    return plan_cluster(trainer, world_size=8, hardware="h100-dgx")


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        pytest.param(
            "Qwen3",
            {"pipeline_parallel": 2, "context_parallel_shard": 2, "tensor_parallel": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param("Qwen3", {"data_parallel_shard": 8}, marks=pytest.mark.full),
        pytest.param("Qwen3", {"context_parallel_shard": 2, "data_parallel_shard": 4}, marks=pytest.mark.full),
        pytest.param("Llama", {"pipeline_parallel": 4, "data_parallel_shard": 2}, marks=pytest.mark.full),
        pytest.param("Llama", {"tensor_parallel": 2, "data_parallel_replicate": 4}, marks=pytest.mark.full),
    ],
)
def test_a_folder_has_the_plan_of_the_family(family: str, mesh: dict[str, int], tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES, tie_word_embeddings=False, dtype=torch.float32)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ours, theirs = plan(tmp_path, mesh, is_own=True), plan(tmp_path, mesh, is_own=False)
    assert theirs.timed.shape == ours.timed.shape
    assert theirs.mfu == pytest.approx(ours.mfu, rel=0.01)
    assert [each.name for each in theirs.memory] == [each.name for each in ours.memory]
    for found, expected in zip(theirs.memory, ours.memory, strict=True):
        for part in ("parameters", "gradients", "optimizer", "unsharded_gradients"):
            # Tables of rotary embeddings, and replicated norms, are a few kilobytes.
            assert getattr(found, part) == pytest.approx(getattr(expected, part), rel=0.02, abs=4096), part
        assert found.activations == pytest.approx(expected.activations, rel=0.25)
