"""The adapter of verl's engine interface, driven as verl's workers drive an engine, in every layout."""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo import GrpoConfig
from jobs import EXAMPLES, options
from own_decoder import Decoder
from torch import Tensor, nn
from verl_engine import VerlEngine

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_modules import Qwen3Params
from d9d_moe import Qwen3MoeParams

NUM_SEQUENCES = 8
LAYOUTS = {
    "dp": {"data_parallel_shard": 2},
    "pp": {"pipeline_parallel": 2},
    "cp": {"context_parallel_shard": 2},
    "tp": {"tensor_parallel": 2},
    "pp-dp": {"pipeline_parallel": 2, "data_parallel_replicate": 2},
    "ep": {"data_parallel_shard": 2, "expert_parallel": 2},
    "pp-ep": {"pipeline_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2},
}


class HalvingRates(VerlEngine):
    """Engine whose learning rates are halved by each call of `lr_scheduler_step`."""

    def learning_rate_factor(self, num_lr_steps: int) -> float:
        return 0.5**num_lr_steps


def _decoder(dense: Qwen3Params, *, has_experts: bool) -> Decoder:
    if not has_experts:
        return Decoder(dense)
    return Decoder(dense, Qwen3MoeParams.like(dense, num_experts=4, top_k=2, expert_intermediate_size=32))


def _batch(dp_rank: int, dp_size: int) -> dict[str, Any]:
    """Return a rank's part of a batch, as verl's trainer hands it out."""
    draws = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 64, (size,), generator=draws) for size in (5, 8, 4, 7, 6, 3, 8, 7)]
    advantages = torch.randn(NUM_SEQUENCES, generator=draws)
    own = slice(dp_rank * NUM_SEQUENCES // dp_size, (dp_rank + 1) * NUM_SEQUENCES // dp_size)
    return {
        "input_ids": torch.nested.as_nested_tensor(sequences[own], layout=torch.jagged),
        "advantages": advantages[own],
        "dp_size": dp_size,
        "global_batch_size": NUM_SEQUENCES,
        "micro_batch_size_per_gpu": 2,
    }


def _loss(model_output: dict[str, Tensor], data: dict[str, Any], dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    """A loss of whole sequences: the square makes it differ from a sum over tokens."""
    assert dp_group.size() == data["dp_size"]
    means = torch.stack([row[:-1].mean() for row in model_output["log_probs"].unbind()])
    losses = (data["advantages"] * means + 0.1 * means.square()).sum()
    return losses * data["dp_size"] / data["global_batch_size"], {"num_rows": len(means)}


def _by_hand(model: nn.Module, data: dict[str, Any]) -> dict[str, Any]:
    """Compute log-probabilities and the gradient norm, one sequence after the other."""
    log_probs = []
    for ids in data["input_ids"].unbind():
        logits = model(ids[None], position_ids=torch.arange(len(ids))[None])[0]
        found = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
        log_probs.append(torch.cat((found, found.new_zeros(1))))
    nested = {"log_probs": torch.nested.as_nested_tensor(log_probs, layout=torch.jagged)}
    means = torch.stack([row[:-1].mean() for row in nested["log_probs"].unbind()])
    ((data["advantages"] * means + 0.1 * means.square()).sum() / NUM_SEQUENCES).backward()
    norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()
    return {"log_probs": [row.tolist() for row in log_probs], "grad_norm": norm.item()}


def _drive(folder: Path, mesh: dict[str, int], has_experts: bool) -> dict[str, Any]:
    """Call the methods in the order of verl's workers: log-probabilities, updates, weights, checkpoint."""
    plain = {"optimizer.kind": "sgd", "optimizer.learning_rate": 0.1}  # Adam would enlarge rounding errors
    arguments = options({"run.folder": folder}, plain, {f"mesh.{key}": value for key, value in mesh.items()})
    config = GrpoConfig.from_cli(EXAMPLES / "grpo.toml", arguments)
    model = _decoder(config.model, has_experts=has_experts)
    engine = HalvingRates(config, model, offloads=True, reference="initial")
    engine.initialize()
    trace: dict[str, Any] = {}
    try:
        assert engine.is_param_offload_enabled
        data = _batch(engine.get_data_parallel_rank(), engine.get_data_parallel_size())
        with engine.eval_mode():
            trace["by hand"] = None if mesh or has_experts else _by_hand(deepcopy(engine.engine.model), data)
            trace["infer"] = _plain(engine.infer_batch(data, _loss))
        for step in range(2):
            with engine.train_mode():
                trace[f"train {step}"] = _plain(engine.train_batch({**data, **_dynamic(step)}, _loss))
                trace[f"rate {step}"] = engine.lr_scheduler_step()
        with engine.eval_mode(), engine.disable_adapter():
            trace["reference"] = _plain(engine.infer_batch(data))
        engine.to("device")
        trace["weights"] = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
        engine.save_checkpoint(str(folder / "actor"), global_step=2)
        engine.train_batch(data, _loss)
        engine.lr_scheduler_step()
        engine.load_checkpoint(str(folder / "actor"))
        trace["loaded"] = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
        trace["loaded rate"] = engine.engine.optimizer.param_groups[0]["lr"]
        engine.to("cpu")
        engine.to("device")
    finally:
        engine.close()
    return trace


def _dynamic(step: int) -> dict[str, Any]:
    """Split the second step's batch by tokens: ranks then have different numbers of microbatches."""
    return {"use_dynamic_bsz": True, "max_token_len_per_gpu": 14} if step == 1 else {}


def _plain(outputs: dict[str, Any]) -> dict[str, Any]:
    """Return outputs as lists; a rank without outputs has none."""
    if not outputs:
        return {}
    rows = {name: [row.tolist() for row in value.unbind()] for name, value in outputs["model_output"].items()}
    return {**rows, "loss": outputs["loss"], **outputs["metrics"]}


def test_the_driver_gets_the_numbers_of_a_loop_by_hand(tmp_path: Path) -> None:
    (trace,) = run_ranks(_drive, tmp_path, {}, False, world_size=1)
    hand, infer, train = trace["by hand"], trace["infer"], trace["train 0"]
    _assert_close(infer["log_probs"], hand["log_probs"])
    _assert_close(train["log_probs"], hand["log_probs"])
    assert train["grad_norm"] == pytest.approx(hand["grad_norm"], rel=1e-5)
    assert infer["num_rows"] == train["num_rows"] == [2, 2, 2, 2]
    assert trace["train 1"]["num_rows"] == [2, 2, 2, 1, 1]  # at most 14 tokens
    assert sum(infer["loss"]) == pytest.approx(sum(train["loss"]), rel=1e-5)
    _assert_close(trace["reference"]["log_probs"], hand["log_probs"])
    assert trace["train 1"]["log_probs"] != train["log_probs"]
    assert [trace["rate 0"], trace["rate 1"], trace["loaded rate"]] == pytest.approx([0.05, 0.025, 0.025])
    assert all(torch.equal(tensor, trace["weights"][name]) for name, tensor in trace["loaded"].items())


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_numbers_of_one_process(tmp_path: Path, layout: str) -> None:
    mesh = LAYOUTS[layout]
    has_experts = "expert_parallel" in mesh
    (one,) = run_ranks(_drive, tmp_path / "one", {}, has_experts, world_size=1)
    world_size = math.prod(size for name, size in mesh.items() if name != "expert_parallel")
    ranks = run_ranks(_drive, tmp_path / "many", mesh, has_experts, world_size=world_size)
    for call in ("infer", "train 0", "train 1", "reference"):
        parts = [rank[call] for rank in ranks if rank[call]]
        assert len(parts) == mesh.get("data_parallel_shard", 1) * mesh.get("data_parallel_replicate", 1)
        _assert_close([row for part in parts for row in part["log_probs"]], one[call]["log_probs"])
        for part in parts if call.startswith("train") else ():
            assert part["grad_norm"] == pytest.approx(one[call]["grad_norm"], rel=1e-4)
    for rank in ranks:
        assert rank["weights"].keys() == one["weights"].keys()
        for name, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, one["weights"][name], rtol=1e-4, atol=1e-5)
            assert torch.equal(tensor, rank["loaded"][name])


def test_calls_that_the_adapter_does_not_support_are_refused() -> None:
    config = GrpoConfig.from_cli(EXAMPLES / "grpo.toml", [])
    engine = VerlEngine(config, Decoder(config.model))
    data = _batch(0, 1)
    with pytest.raises(UserError, match=r"got a temperature, or calculate_entropy in training; expected 1\.0"):
        engine.infer_batch({**data, "temperature": 0.7})
    with pytest.raises(UserError, match="got a temperature, or calculate_entropy in training"):
        engine.train_batch({**data, "calculate_entropy": True}, _loss)
    with pytest.raises(UserError, match=r"got to\('cpu'\) of a part of the state"):
        engine.to("cpu", optimizer=False)
    with pytest.raises(UserError, match="got hdfs_path, max_ckpt_to_keep; expected none"):
        engine.save_checkpoint("actor", "hdfs://actor", max_ckpt_to_keep=1)
    with pytest.raises(UserError, match="got del_local_after_load; expected none"):
        engine.load_checkpoint("actor", del_local_after_load=True)
    engine.is_pending = True
    with pytest.raises(UserError, match=r"got optimizer_zero_grad\(\) after a backward pass"):
        engine.train_batch(data, _loss)


def _assert_close(rows: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(row) for row in rows] == [len(row) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-4)
