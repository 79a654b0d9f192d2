"""Ten steps of a job beside those of the library that it comes from, as the pairs of docs/coming_from.md."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_loop import AdamWConfig, BatchConfig, Finished, Loss, StepDone, Task, Trainer, TrainerConfig, validate_config

pytestmark = pytest.mark.slow

QUICK = {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}}
LLAMA: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@dataclass
class Curve:
    """Values of each step, and the parameters at the end."""

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Curve)
        assert self.rates == other.rates  # exactly
        assert self.losses == pytest.approx(other.losses, rel=1e-6)
        assert self.norms == pytest.approx(other.norms, rel=1e-6)
        assert self.weights.keys() == other.weights.keys()
        torch.testing.assert_close(self.weights, other.weights, rtol=1e-5, atol=1e-6)
        return True

    __hash__ = None


def follow(trainer: Trainer, curve: Curve, *, stop_at: int | None = None) -> None:
    """Train and record the steps; with `stop_at`, fail after this step."""

    def step(done: StepDone) -> None:
        curve.rates.append(done.learning_rate)
        curve.losses.append(done.loss.item())
        curve.norms.append(done.grad_norm.item())
        if done.step == stop_at:
            raise InterruptedError

    def finish(done: Finished) -> None:
        for name, each in done.model.named_parameters():
            curve.weights[name] = (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()

    trainer.events.on(StepDone, step)
    trainer.events.on(Finished, finish)
    trainer.train()


def ours(build: Callable[[Path], Trainer], folder: Path) -> Curve:
    """Return the curve of a job, on any number of ranks."""
    curve = Curve()
    follow(build(folder), curve)
    return curve


def resumed(build: Callable[[Path], Trainer], folder: Path) -> Curve:
    """Return the curve of a job that fails after step 6 and resumes at step 5."""
    first, second = Curve(), Curve()
    with pytest.raises(InterruptedError):
        follow(build(folder), first, stop_at=6)
    follow(build(folder), second)
    rest = {name: getattr(first, name)[:5] + getattr(second, name) for name in ("rates", "losses", "norms")}
    return Curve(**rest, weights=second.weights)


def check(build: Callable[[Path], Trainer], folder: Path, expected: Curve) -> None:
    """Compare a job on one process, on two ranks and after a resume with the curve of another library."""
    assert len(expected.losses) == 10
    assert ours(build, folder / "one") == expected
    assert resumed(build, folder / "resumed") == expected
    for found in run_ranks(ours, build, folder / "two", world_size=2):
        assert found == expected


def config(folder: Path, **sections: Any) -> TrainerConfig:
    values = {
        "batch": {"global_size": 4, "microbatch_size": 2},
        "run": {"folder": folder},
        "mesh": {"data_parallel_shard": -1},
        "precision": "parameters",
        "checkpoint": {"every": 5},
        "data": {"shuffle": False},
        "logging": {"progress": False, "report": False},
        "resilience": QUICK,
    }
    return validate_config(TrainerConfig, {**values, **sections})


# transformers


class NextToken(Task):
    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input_ids": batch["input_ids"]}

    def loss(self, outputs: Any, batch: Any) -> Loss:
        labels = batch["labels"][:, 1:]
        losses = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
        return Loss(losses, weight=(labels != -100).sum())


def sequences(count: int = 38) -> list[dict[str, torch.Tensor]]:
    """Return samples with different numbers of labels."""
    draws, samples = torch.Generator().manual_seed(0), []
    for number in range(count):
        ids = torch.randint(0, 32, (10,), generator=draws)
        samples.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(10) < number % 5, -100)})
    return samples


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).train()


def from_transformers(folder: Path, data: Any = None, **sections: Any) -> Trainer:
    """Return the job of the pair for the Trainer of transformers."""
    return Trainer(
        config(
            folder,
            epochs=1,
            optimizer={"learning_rate": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.999]},
            lr_schedule={"kind": "transformers", "name": "cosine", "warmup_steps": 2},
            gradients={"max_norm": 1.0},
            **sections,
        ),
        model=llama,
        data=data or sequences(),
        task=NextToken(),
    )


def with_transformers(folder: Path, samples: Any = None, *, saves: Any = "no", **options: Any) -> Curve:
    import transformers

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            samples: Any = self.train_dataset if train_dataset is None else train_dataset
            return torch.utils.data.SequentialSampler(samples)

    args = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=1.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy=saves,
        save_steps=5,
        **options,
    )
    model = llama()
    data: Any = samples or sequences()
    trainer: Any = InOrder(model, args=args, train_dataset=data)
    curve, rates = Curve(), []
    step = trainer.create_optimizer().step
    trainer.optimizer.step = lambda *a, **k: (rates.append(trainer.optimizer.param_groups[0]["lr"]), step(*a, **k))[1]
    losses: list[torch.Tensor] = []
    compute = trainer.training_step
    trainer.training_step = lambda *a, **k: (losses.append(compute(*a, **k)), losses[-1])[1]
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    curve.rates, curve.norms = rates, [line["grad_norm"] for line in lines]
    parts = [each.item() for each in losses]
    curve.losses = [sum(parts[start : start + 2]) for start in range(0, len(parts), 2)]
    curve.weights = {name: each.detach() for name, each in model.named_parameters()}
    return curve


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check(from_transformers, tmp_path, with_transformers(tmp_path / "theirs"))


def even() -> list[dict[str, torch.Tensor]]:
    """Return samples of eight labels each: their sum is divided by a power of two, which rounds nothing in bfloat16."""
    return [{name: each[:9] for name, each in sample.items()} for sample in sequences() if sample["labels"][0] >= 0]


def test_bf16_of_transformers_is_autocast(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    expected = with_transformers(tmp_path / "theirs", even(), bf16=True)
    found = ours(lambda folder: from_transformers(folder, even(), precision="autocast"), tmp_path)
    assert found == expected
    assert found.losses[0] != pytest.approx(with_transformers(tmp_path / "float32", even()).losses[0], rel=1e-6)


# loops of torch, Accelerate and Lightning


class Regression(Task):
    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss.sum(F.mse_loss(outputs, batch["y"], reduction="none"), batch["y"].numel())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))


def points() -> Any:
    draws = torch.Generator().manual_seed(0)
    return [{"x": x, "y": x.sum(0, keepdim=True)} for x in torch.randn(40, 4, generator=draws)]


def from_a_loop(folder: Path) -> Trainer:
    """Return the job of the pairs for Accelerate, Lightning, DeepSpeed and FSDP2."""
    return Trainer(
        config(
            folder,
            steps=10,
            optimizer={"learning_rate": 1e-2, "weight_decay": 0.01, "betas": [0.9, 0.999], "decays": "all"},
            lr_schedule={"kind": "transformers", "name": "constant"},
            gradients={"max_norm": 1.0},
        ),
        model=net,
        data=points(),
        task=Regression(),
    )


def with_torch() -> Curve:
    """Run the loop that DeepSpeed and FSDP2 shard, in one process."""
    model, curve = net(), Curve()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(points(), batch_size=4)
    for batch in loader:
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        curve.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        curve.losses.append(loss.item())
        curve.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
    curve.weights = {name: each.detach() for name, each in model.named_parameters()}
    return curve


def test_a_loop_of_torch(tmp_path: Path) -> None:
    check(from_a_loop, tmp_path, with_torch())


def with_fully_shard(saved: Path | None = None) -> Curve:
    """Run the loop with FSDP2 of torch on the ranks of the job, as torchtitan does; save the fifth step."""
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        rank, ranks = ctx.coordinate("batch", "dp"), ctx.size("batch", "dp")
        model, curve = net(), Curve()
        fully_shard(model, mesh=ctx.mesh_for("batch")["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for start in range(0, 40, 4):
            samples = points()[start : start + 4]
            batch = torch.utils.data.default_collate(samples[rank * 4 // ranks : (rank + 1) * 4 // ranks])
            loss = F.mse_loss(model(batch["x"]), batch["y"])
            loss.backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            curve.norms.append(norm.full_tensor().item())
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            curve.losses.append(mean.item() / ranks)
            curve.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            if saved is not None and start == 16:
                weights, state = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": state}, checkpoint_id=saved)
        whole: Any = dict(model.named_parameters())
        curve.weights = {name: each.full_tensor().detach().clone() for name, each in whole.items()}
    return curve


def test_a_loop_with_fully_shard(tmp_path: Path) -> None:
    expected = run_ranks(with_fully_shard, world_size=2)[0]
    check(from_a_loop, tmp_path, expected)


def from_torchtitan(folder: Path) -> Trainer:
    """Return the job of the pair for torchtitan: sequences with different numbers of labels."""
    return Trainer(
        config(
            folder,
            steps=10,
            optimizer={"learning_rate": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.95], "decays": "all"},
            lr_schedule={"kind": "transformers", "name": "linear", "warmup_steps": 2},
            gradients={"max_norm": 1.0},
        ),
        model=llama,
        data=sequences(40),
        task=NextToken(),
    )


def with_torchtitan() -> Curve:
    """Run the loop of torchtitan: sums of losses, divided by the number of labels of all ranks."""
    import transformers

    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        rank, ranks = ctx.coordinate("batch", "dp"), ctx.size("batch", "dp")
        model, curve = llama(), Curve()
        for block in (*model.model.layers, model):
            fully_shard(block, mesh=ctx.mesh_for("batch")["dp"])
            block.set_gradient_divide_factor(1.0)
            block.set_force_sum_reduction_for_comms(True)  # gloo has no sum of scaled values
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 10)
        for start in range(0, 40, 4):
            samples = sequences(40)[start + rank * 4 // ranks : start + (rank + 1) * 4 // ranks]
            batch = torch.utils.data.default_collate(samples)
            count = (batch["labels"][:, 1:] != -100).sum()
            torch.distributed.all_reduce(count)
            loss = NextToken().loss(model(input_ids=batch["input_ids"]), batch).total / count
            loss.backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            whole = loss.detach().clone()
            torch.distributed.all_reduce(whole)
            curve.norms.append(norm.full_tensor().item())
            curve.losses.append(whole.item())
            curve.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        parameters: Any = dict(model.named_parameters())
        curve.weights = {name: each.full_tensor().detach().clone() for name, each in parameters.items()}
    return curve


def test_torchtitan(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    expected = run_ranks(with_torchtitan, world_size=2)[0]
    check(from_torchtitan, tmp_path, expected)


def save_distributed(folder: Path) -> Curve:
    """Run the job, which writes a distributed checkpoint of torch at its end."""
    trainer, curve = from_a_loop(folder), Curve()
    trainer.events.on(Finished, lambda done: dcp.save({"model": done.model.state_dict()}, checkpoint_id=folder / "dcp"))
    follow(trainer, curve)
    return curve


def test_a_job_on_two_ranks_writes_a_distributed_checkpoint(tmp_path: Path) -> None:
    expected = run_ranks(save_distributed, tmp_path, world_size=2)[0].weights
    read = {"model": net().state_dict()}
    dcp.load(read, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(read["model"][name], each) for name, each in expected.items())


# timm


class Classify(Task):
    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"x": batch["image"]}

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        losses = F.cross_entropy(outputs, batch["label"], reduction="none", label_smoothing=0.1)
        return Loss.sum(losses, len(outputs))


def vit() -> nn.Module:
    import timm  # noqa: PLC0415 - optional

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    sizes["qkv_bias"] = False  # the gradient of a bias of keys is 0, so that AdamW follows roundings
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes).train()


def images() -> Any:
    draws = torch.Generator().manual_seed(0)
    return [{"image": torch.randn(3, 16, 16, generator=draws), "label": torch.tensor(n % 5)} for n in range(40)]


def with_schedule_of_timm(optimizer: torch.optim.Optimizer, peak: float) -> Any:
    import timm.scheduler  # noqa: PLC0415 - optional

    options: dict[str, Any] = {"warmup_lr_init": 0.1 * peak, "t_in_epochs": False}
    return timm.scheduler.CosineLRScheduler(optimizer, t_initial=10, warmup_t=2, **options)


def timm_schedule() -> Callable[[int], float]:
    """Return the factor of the learning rates in each step, as a scheduler of timm for the peak 1 sets it."""
    probe = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = with_schedule_of_timm(probe, 1.0)

    def factor(step: int) -> float:
        scheduler.step_update(step)
        return probe.param_groups[0]["lr"]

    return factor


def from_timm(folder: Path) -> Trainer:
    """Return the job of the pair for a training script of timm."""
    return Trainer(
        config(
            folder,
            steps=10,
            optimizer={"learning_rate": 1e-2, "weight_decay": 0.05, "betas": [0.9, 0.999], "layer_decay": 0.75},
            average={"decay": 0.9},
            gradients={"max_norm": 1.0},
        ),
        model=vit,
        data=images(),
        task=Classify(),
        lr_schedule=timm_schedule(),
    )


def with_timm() -> Curve:
    """Run a loop as that of timm's train.py; the final weights are those of the average."""
    import timm.loss  # noqa: PLC0415 - optional
    import timm.optim  # noqa: PLC0415 - optional
    import timm.utils  # noqa: PLC0415 - optional

    model, curve = vit(), Curve()
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-2, weight_decay=0.05, layer_decay=0.75)
    schedule = with_schedule_of_timm(optimizer, 1e-2)
    average = timm.utils.ModelEmaV3(model, decay=0.9)
    criterion = timm.loss.LabelSmoothingCrossEntropy(0.1)
    for number, batch in enumerate(torch.utils.data.DataLoader(images(), batch_size=4), start=1):
        loss = criterion(model(batch["image"]), batch["label"])
        loss.backward()
        curve.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        curve.losses.append(loss.item())
        curve.rates.append(max(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        optimizer.zero_grad()
        average.update(model, step=number)
        schedule.step_update(number)
    curve.weights = {name: each.detach() for name, each in average.module.named_parameters()}
    return curve


def test_timm(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    check(from_timm, tmp_path, with_timm())


def test_layers_of_timm_have_its_rates() -> None:
    timm = pytest.importorskip("timm")
    from timm.optim import param_groups_layer_decay  # noqa: PLC0415 - optional

    for name in ("vit_tiny_patch16_224", "resnet10t", "swin_tiny_patch4_window7_224"):
        with torch.device("meta"):
            model: Any = timm.create_model(name)
        plain = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
        theirs = param_groups_layer_decay(model, 0.1, plain, layer_decay=0.7)
        names = {parameter: key for key, parameter in model.named_parameters()}
        expected = {names[each]: (g["lr_scale"], g["weight_decay"]) for g in theirs for each in g["params"]}
        ours = AdamWConfig(learning_rate=1.0, layer_decay=0.7).build(model).param_groups
        found = {key: (group["lr"], group["weight_decay"]) for group in ours for key in group["param_names"]}
        assert found.keys() == expected.keys()
        assert all(each == pytest.approx(expected[key]) for key, each in found.items())


# Accelerate and Lightning


def with_accelerate(processes: int = 1, saved: Path | None = None) -> Curve:
    """Run the loop of Accelerate on the processes that have started; save the fifth step."""
    import accelerate  # noqa: PLC0415 - optional

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2 // processes, cpu=True)
    assert accelerator.num_processes == processes
    loader = torch.utils.data.DataLoader(points(), batch_size=2)
    model, curve = net(), Curve()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    parts = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(batch["x"]), batch["y"])
            parts.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                curve.norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                curve.rates.append(optimizer.param_groups[0]["lr"])
                curve.losses.append(sum(parts) / len(parts))
                parts.clear()
            optimizer.step()
            optimizer.zero_grad()
        if saved is not None and len(curve.losses) == 5 and not parts:
            accelerator.save_state(str(saved))
    whole = accelerator.unwrap_model(model).named_parameters()
    curve.weights = {name: each.detach().clone() for name, each in whole}
    return curve


def on_launched_ranks() -> Curve:
    """Run the loop of Accelerate on two ranks, as `accelerate launch` starts them."""
    from accelerate.state import AcceleratorState  # noqa: PLC0415 - optional

    with MeshConfig().build():
        curve = with_accelerate(2)
        AcceleratorState._reset_state(reset_partial_state=True)
    return curve


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    check(from_a_loop, tmp_path, with_accelerate())


def test_accelerate_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found = ours(from_a_loop, tmp_path)
    for curve in run_ranks(on_launched_ranks, world_size=2):
        assert found == curve


def with_lightning(folder: Path) -> Curve:
    """Run the loop of Lightning, which saves each fifth step."""
    lightning: Any = pytest.importorskip("lightning")
    curve = Curve()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.mse_loss(self.model(batch["x"]), batch["y"])
            curve.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            curve.norms.append(nn.utils.get_total_norm([each.grad for each in self.parameters()]).item())
            curve.rates.append(optimizer.param_groups[0]["lr"])

    module = Module()
    saves = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
    options: dict[str, Any] = {"logger": False, "callbacks": [saves], "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=10, gradient_clip_val=1.0, accelerator="cpu", devices=1, default_root_dir=str(folder), **options
    )
    trainer.fit(module, torch.utils.data.DataLoader(points(), batch_size=4))
    curve.weights = {name: each.detach() for name, each in module.model.named_parameters()}
    return curve


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    check(from_a_loop, tmp_path, with_lightning(tmp_path / "theirs"))


# DeepSpeed


def with_deepspeed(stage: int) -> Curve:
    """Run the loop of DeepSpeed on the ranks of the job, with a stage of ZeRO."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ["RANK"]}
    deepspeed: Any = import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    model, curve, parts = net(), Curve(), []
    settings = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untrained_optimizer": True,  # torch's
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    samples = [points()[start : start + 2] for start in range(0, 40, 2)][rank::ranks]
    for batch in map(torch.utils.data.default_collate, samples):
        loss = F.mse_loss(engine(batch["x"]), batch["y"])
        parts.append(loss.detach().clone())
        torch.distributed.all_reduce(parts[-1])
        engine.backward(loss)
        if ends := engine.is_gradient_accumulation_boundary():
            curve.rates += engine.get_lr()
        engine.step()
        if ends:
            curve.losses.append(sum(part.item() for part in parts) / 2)
            curve.norms.append(float(engine.get_global_grad_norm()))
            parts.clear()
    whole = deepspeed.utils.safe_get_full_fp32_param
    curve.weights = {name: whole(each).detach().clone() for name, each in model.named_parameters()}
    deepspeed.comm.destroy_process_group()
    return curve


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_on_two_ranks(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    found = ours(from_a_loop, tmp_path)
    for curve in run_ranks(with_deepspeed, stage, world_size=2):
        assert found == curve


def test_defaults_of_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    adam: Any = import_module("deepspeed.ops.adam.fused_adam")
    values = inspect.signature(adam.FusedAdam).parameters
    assert (values["weight_decay"].default, values["betas"].default) == (0.0, (0.9, 0.999))


# the table of defaults


def table() -> dict[str, dict[str, str]]:
    """Return the cells of the page's first table by row and column."""
    text = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    lines = text.partition("## Defaults that differ")[2].partition("All examples")[0].strip().splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def shown(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-").replace("0.001", "1e-3")


def test_defaults_of_the_trainers_and_of_d9d(tmp_path: Path) -> None:
    transformers, trl = pytest.importorskip("transformers"), pytest.importorskip("trl")
    own = TrainerConfig(batch=BatchConfig(global_size=1))
    found, columns = table(), ("Trainer", "TRL `SFTTrainer`")
    assert isinstance(own.optimizer, AdamWConfig)
    assert found["learning rate"]["d9d"] == shown(own.optimizer.learning_rate)
    assert found["`betas` of AdamW"]["d9d"] == "{:g}, {:g}".format(*own.optimizer.betas)
    assert found["weight decay"]["d9d"].startswith(shown(own.optimizer.weight_decay) + ", without norms")
    assert (found["clipping"]["d9d"], own.gradients.max_norm) == ("none", None)
    options: dict[str, Any] = {"use_cpu": True, "bf16": False}
    for column, kind in zip(columns, (transformers.TrainingArguments, trl.SFTConfig), strict=True):
        args = kind(str(tmp_path), **options)
        assert args.optim.startswith("adamw")
        assert found["learning rate"][column] == shown(args.learning_rate)
        assert found["`betas` of AdamW"][column] == f"{args.adam_beta1:g}, {args.adam_beta2:g}"
        assert args.weight_decay == 0
        assert found["schedule"][column] == f"{args.lr_scheduler_type.value} to 0"
        assert found["label smoothing"][column] == shown(args.label_smoothing_factor)
        assert found["clipping"][column] == f"{args.max_grad_norm:.1f}"
        assert found["batch size"][column] == f"{args.per_device_train_batch_size} per device"
        assert found["length"][column] == f"{args.num_train_epochs:g} epochs"
        assert found["activation checkpointing"][column] == ("on" if args.gradient_checkpointing else "off")


def test_defaults_of_torch_and_timm() -> None:
    pytest.importorskip("timm")
    import timm.loss  # noqa: PLC0415 - optional
    import timm.optim  # noqa: PLC0415 - optional
    import timm.scheduler  # noqa: PLC0415 - optional

    found = {row: cells["timm"] for row, cells in table().items()}
    theirs = torch.optim.AdamW(net().parameters()).defaults
    others = {row: cells["Accelerate, Lightning, FSDP2, DeepSpeed"] for row, cells in table().items()}
    assert others["`betas` of AdamW"] == "{:g}, {:g} (torch)".format(*theirs["betas"])
    assert others["weight decay"] == f"{theirs['weight_decay']:g} on all parameters (torch)"
    optimizer = timm.optim.create_optimizer_v2(net(), lr=0.1)
    (group,) = optimizer.param_groups
    assert type(optimizer).__name__ in found["optimizer"]
    assert (group["momentum"], group["nesterov"], group["weight_decay"]) == (0.9, True, 0)
    arguments = inspect.signature(timm.scheduler.create_scheduler_v2).parameters
    assert (arguments["sched"].default, arguments["min_lr"].default) == ("cosine", 0)
    assert arguments["step_on_epochs"].default
    assert found["rate of the first step of a warm-up"] == f"`warmup_lr` = {shown(arguments['warmup_lr'].default)}"
    assert found["length"] == f"{arguments['num_epochs'].default} epochs"
    assert found["label smoothing"] == shown(
        inspect.signature(timm.loss.LabelSmoothingCrossEntropy).parameters["smoothing"].default
    )
