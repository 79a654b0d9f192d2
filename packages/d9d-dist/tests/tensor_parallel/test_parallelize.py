from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d9d_dist import (
    ColumnParallel,
    GradientSync,
    MeshConfig,
    Replicated,
    RowParallel,
    SequenceParallel,
    TensorRegion,
    TensorStyle,
    UserError,
    VocabParallelEmbedding,
    VocabParallelHead,
    materialize,
    parallelize_hsdp,
    parallelize_tensor,
)
from d9d_dist.tensor_parallel.vocab import TokenLoss, VocabParallelCrossEntropy, token_cross_entropy
from d9d_dist.testing import Device, assert_trees_close, full_gradients, run_ranks

VOCAB, SIZE, HEADS, HEAD_DIM, LENGTH = 16, 12, 4, 3, 8


class _Norm(nn.Module):
    """A custom norm with a weight and a bias, unknown to the library."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, mean=1.0)
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + 0.1).sqrt() * self.weight + self.bias


class _Heads(nn.Module):
    """A module with the shapes of attention: heads mix tokens, and all heads share a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(SIZE, HEADS * HEAD_DIM)
        self.norm = _Norm(HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, SIZE)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        heads = self.norm(self.proj(x).unflatten(-1, (-1, HEAD_DIM))) + shift
        return self.out(heads.cumsum(dim=1).flatten(2))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = _Norm(SIZE), _Heads()
        self.up, self.down = nn.Linear(SIZE, 8), nn.Linear(8, SIZE)
        self.scale = nn.Parameter(torch.empty(SIZE))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale, mean=1.0)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        x = x + self.heads(self.norm(x), shift)
        return x + self.down(F.gelu(self.up(x))) * self.scale


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_loss: TokenLoss = token_cross_entropy
        self.weight = nn.Parameter(torch.empty(VOCAB, SIZE))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = F.linear(x, self.weight)
        if labels is None:
            return logits
        return self.token_loss(logits.flatten(0, 1), labels.flatten())


class _Model(nn.Module):
    def __init__(self, *, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(VOCAB, SIZE)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.norm, self.head = _Norm(SIZE), _Head()
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.get_parameter("weight")

    def forward(self, ids: Tensor, *, labels: Tensor | None = None) -> Tensor:
        assert self.embedding is not None
        x = self.embedding(ids)
        shift = torch.linspace(0, 1, HEAD_DIM, dtype=x.dtype, device=x.device)
        for block in self.blocks:
            x = checkpoint(block, x, shift, use_reentrant=False) if self.checkpointed else block(x, shift)
        return self.head(self.norm(x), labels=labels)


def _plan(*, sequence: bool) -> dict[str, TensorStyle]:
    between: Placement = Shard(1) if sequence else Replicate()
    along: dict[str, TensorStyle] = {"blocks": SequenceParallel(), "norm": SequenceParallel()} if sequence else {}
    return {
        "embedding": VocabParallelEmbedding(output=between),
        **along,
        "blocks.*.heads": TensorRegion(input=between),
        "blocks.*.heads.proj": ColumnParallel(input=None, head_dim=HEAD_DIM),
        "blocks.*.heads.out": RowParallel(output=between),
        "blocks.*.up": ColumnParallel(input=between),
        "blocks.*.down": RowParallel(output=between),
        "head": VocabParallelHead(input=between),
    }


def _train(plan: Mapping[str, TensorStyle] | None, degrees: dict[str, int], options: dict[str, bool]) -> Any:
    """Return logits, losses, summed gradients of two microbatches, and placements."""
    with MeshConfig(**degrees).build() as ctx:
        with torch.device("meta"):
            model = _Model(**options).double()
        dense = ctx.mesh_for("dense")
        if plan is not None:
            parallelize_tensor(model, dense["tp"], plan)
        parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard"], shard_axis="dp_cp_shard")
        materialize(model, device=ctx.device, seed=0)
        sync = GradientSync(model, num_microbatches=2)
        draws = torch.Generator().manual_seed(0)
        ids, labels = torch.randint(0, VOCAB, (2, 4, LENGTH), generator=draws)
        dp = ctx.mesh_for("batch")["dp"]
        mine = slice(dp.get_local_rank(), None, dp.size())
        logits = model(ids[mine].to(ctx.device)).detach().cpu()
        for row_ids, row_labels in zip(ids[mine].chunk(2), labels[mine].chunk(2), strict=True):
            model(row_ids.to(ctx.device), labels=row_labels.to(ctx.device)).sum().backward()
        sync.finish()
        placements = {name: str(p.placements) for name, p in model.named_parameters() if isinstance(p, DTensor)}
        return logits if dp.size() == 1 else None, full_gradients(model), placements


_ON_FOUR = {"tensor_parallel": 2, "data_parallel_shard": 2}


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({"tensor_parallel": 2}, {}),
        ({"tensor_parallel": 2}, {"tied": True}),
        ({"tensor_parallel": 2}, {"checkpointed": True}),
        pytest.param(_ON_FOUR, {}, marks=pytest.mark.world_size(4)),
        pytest.param(_ON_FOUR, {"tied": True}, marks=[pytest.mark.world_size(4), pytest.mark.full]),
        pytest.param(_ON_FOUR, {"checkpointed": True}, marks=[pytest.mark.world_size(4), pytest.mark.full]),
    ],
    ids=str,
)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.slow(
    "cpu-False-{'tensor_parallel': 2}-{'checkpointed': True}",
    "cpu-False-{'tensor_parallel': 2}-{'tied': True}",
    "cpu-True-{'tensor_parallel': 2}-{}",
    "cpu-False-{'tensor_parallel': 2, 'data_parallel_shard': 2}-{}",
)
def test_tensor_parallel_training_equals_one_process(
    sequence: bool, degrees: dict[str, int], options: dict[str, bool], device: Device
) -> None:
    ((logits, gradients, _),) = run_ranks(_train, None, {}, options, world_size=1)
    world_size = 2 * degrees.get("data_parallel_shard", 1)
    for found in run_ranks(_train, _plan(sequence=sequence), degrees, options, world_size=world_size, device=device):
        assert found[0] is None or torch.allclose(found[0], logits, rtol=1e-12, atol=1e-12)
        assert_trees_close(found[1], gradients, rtol=1e-12)


def test_every_parameter_is_a_dtensor_with_the_placement_of_its_style() -> None:
    (_, _, found), *_ = run_ranks(_train, _plan(sequence=True), {"tensor_parallel": 2}, {})
    assert len(found) == len(list(_Model().parameters()))
    split = {name: placement for name, placement in found.items() if "Shard" in placement}
    block = {"heads.proj.weight": 0, "heads.proj.bias": 0, "heads.out.weight": 1, "up.weight": 0, "up.bias": 0}
    block["down.weight"] = 1
    expected = {f"blocks.{i}.{name}": f"(Shard(dim={dim}),)" for i in range(2) for name, dim in block.items()}
    assert split == {**expected, "embedding.weight": "(Shard(dim=0),)", "head.weight": "(Shard(dim=0),)"}


def _refusal(plan: dict[str, TensorStyle], options: dict[str, bool], degree: int) -> str:
    with MeshConfig(tensor_parallel=degree).build() as ctx:
        with torch.device("meta"):
            model = _Model(**options)
        with pytest.raises(UserError) as caught:
            parallelize_tensor(model, ctx.mesh_for("dense")["tp"], plan)
        return str(caught.value)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"blocks.*.attention": TensorRegion()},
            "the tensor-parallel plan names 'blocks.*.attention', which matches no submodule of _Model; it has "
            "embedding, blocks, blocks.0, blocks.0.norm, blocks.0.heads, blocks.0.heads.proj, blocks.0.heads.norm, "
            "blocks.0.heads.out, ... (20 in total).",
        ),
        (
            {"blocks.*.up": ColumnParallel(), "blocks.1.*": SequenceParallel()},
            "the tensor-parallel plan matches blocks.1.up twice, by 'blocks.*.up' and by 'blocks.1.*'; expected one "
            "style for each submodule.",
        ),
        (
            {"blocks.*.up": ColumnParallel()},
            "the tp degree = 3 does not divide dim 0 of blocks.0.up.weight, which is 8. Use a degree that divides 8.",
        ),
        (
            {"blocks.*.heads.proj": ColumnParallel(head_dim=HEAD_DIM)},
            "the tp degree = 3 does not divide dim 0 of blocks.0.heads.proj.weight, which is 4 blocks of 3. "
            "Use a degree that divides 4.",
        ),
        (
            {"head": VocabParallelHead()},
            "the tp degree = 3 does not divide dim 0 of head.weight, which is 16. Use a degree that divides 16.",
        ),
    ],
    ids=["no match", "two matches", "uneven", "half a head", "vocabulary"],
)
def test_a_plan_that_does_not_match_the_model_is_refused(plan: dict[str, TensorStyle], message: str) -> None:
    assert run_ranks(_refusal, plan, {}, 3, world_size=3) == [message] * 3


class _SplitsFeatures(TensorStyle):
    def placements(self) -> Mapping[str, Placement]:
        return {"weight": Shard(1)}


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(8, 8, 3, groups=2),
        nn.ConvTranspose1d(8, 8, 3),
        nn.GroupNorm(2, 8),
        nn.BatchNorm1d(8),
        nn.Bilinear(8, 8, 8),
        nn.Embedding(8, 8),
    ],
)
@pytest.mark.parametrize("style", [ColumnParallel(), RowParallel()])
def test_layers_that_a_split_weight_changes_are_an_error(style: TensorStyle, layer: nn.Module) -> None:
    with MeshConfig().build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]
        with pytest.raises(
            UserError, match=rf"Parallel got {type(layer).__name__}\(.*; expected a linear layer, a convo"
        ):
            parallelize_tensor(nn.ModuleDict({"layer": layer}), mesh, {"layer": style})
        parallelize_tensor(nn.ModuleDict({"layer": nn.Conv1d(8, 8, 3)}), mesh, {"layer": style})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"norm": VocabParallelHead()},
            "VocabParallelHead got a _Norm; expected a module whose attribute token_loss computes the losses "
            "(d9d_dist.HasTokenLoss). For a plain linear layer use ColumnParallel(output=Replicate()).",
        ),
        (
            {"norm": VocabParallelEmbedding()},
            "VocabParallelEmbedding got a _Norm; expected a torch.nn.Embedding with torch's own forward, because the "
            "lookup is replaced. Put other computations into a wrapper module.",
        ),
        (
            {"blocks.0": ColumnParallel()},
            "blocks.0 is a _Block without its own parameter weight or bias, which ColumnParallel shards; "
            "expected a layer such as torch.nn.Linear. Name the layer itself in the plan.",
        ),
        (
            {"embedding": _SplitsFeatures(), "head": VocabParallelHead()},
            "embedding.weight and head.weight are one tied parameter, which the plan places as S(1) and as S(0); "
            "expected one placement.",
        ),
        (
            {"head": VocabParallelHead()},
            "head.weight and embedding.weight are one shared parameter, and the plan splits only the first; expected "
            "styles for both. Name both modules, or neither.",
        ),
    ],
    ids=["no loss", "no embedding", "no weight", "tied", "tied to an unnamed one"],
)
def test_a_style_that_does_not_suit_the_module_is_refused(plan: dict[str, TensorStyle], message: str) -> None:
    assert run_ranks(_refusal, plan, {"tied": True}, 2) == [message] * 2


def _zeros() -> _Model:
    """Return a model with equal values on all ranks, which compare them."""
    model = _Model()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def _partial_or_not() -> dict[str, bool]:
    """Return which gradients are partial: those inside a region, except in submodules excluded from it."""
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        model = _zeros()
        plan = {"blocks.0.heads": TensorRegion(), "blocks.1": SequenceParallel(), "blocks.1.norm": Replicated()}
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], plan)
        x = torch.ones(1, 2, SIZE)
        for block in model.blocks:
            block(x, torch.zeros(HEAD_DIM)).sum().backward()
        return {
            name: p.grad.placements[0].is_partial()
            for name, p in model.named_parameters()
            if isinstance(p.grad, DTensor)
        }


def test_submodules_of_a_module_with_a_style_have_partial_gradients() -> None:
    first, *_ = run_ranks(_partial_or_not)
    partial = {name for name, is_partial in first.items() if is_partial}
    outside = {"blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.scale", "blocks.1.norm.weight"}
    assert {name for name in first if "blocks.0.heads" in name} <= partial
    assert {name for name in first if "blocks.1." in name and "blocks.1.norm" not in name} <= partial
    assert not partial & outside


def test_one_rank_leaves_the_model_unchanged() -> None:
    with MeshConfig().build() as ctx:
        model = _Model()
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], _plan(sequence=True))
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        with pytest.raises(UserError, match=r"names 'no.such', which matches no submodule of _Model"):
            parallelize_tensor(model, ctx.mesh_for("dense")["tp"], {"no.such": ColumnParallel()})


def test_a_plan_may_name_modules_of_other_pipeline_stages() -> None:
    with MeshConfig().build() as ctx:
        model = _Model()
        model.embedding = None
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], _plan(sequence=True))


def test_refuses_a_mesh_of_several_axes() -> None:
    with (
        MeshConfig().build() as ctx,
        pytest.raises(
            UserError, match=r"got a mesh with the axes \(.*tp\); expected exactly one. Slice it: mesh\['tp'\]."
        ),
    ):
        parallelize_tensor(_Model(), ctx.mesh_for("dense"), {})


def _failing_forward() -> bool:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        model = nn.Sequential(nn.Linear(4, 4))
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], {"0": ColumnParallel()})
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 5))
        return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_parameters_are_restored_after_a_failed_forward() -> None:
    assert run_ranks(_failing_forward) == [True, True]


def _applied_again() -> list[str]:
    messages = []
    with MeshConfig(tensor_parallel=2, data_parallel_shard=2).build() as ctx:
        dense = ctx.mesh_for("dense")
        model = _zeros()
        parallelize_tensor(model, dense["tp"], {"blocks.*.up": ColumnParallel(), "blocks.*.down": RowParallel()})
        with pytest.raises(UserError) as caught:
            parallelize_tensor(model.blocks[0], dense["tp"], {"up": ColumnParallel()})
        messages.append(str(caught.value))
        parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard"], shard_axis="dp_cp_shard")
        with pytest.raises(UserError) as caught:
            parallelize_tensor(model, dense["tp"], {"norm": SequenceParallel()})
        messages.append(str(caught.value))
    return messages


def test_parallelize_tensor_must_be_called_once_and_first() -> None:
    again = (
        "up is already tensor parallel; expected parallelize_tensor to name each submodule once. Remove it from this "
        "plan."
    )
    late = (
        "the module is already data parallel; expected parallelize_tensor to be called first. Call it before "
        "parallelize_hsdp, parallelize_fsdp and parallelize_replicate."
    )
    assert run_ranks(_applied_again, world_size=4) == [[again, late]] * 4


def _own_values_per_rank() -> list[str]:
    messages = []
    with MeshConfig(tensor_parallel=2, data_parallel_shard=2).build() as ctx:
        for seed in (ctx.rank, ctx.rank // 2):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
            try:
                parallelize_tensor(model, ctx.mesh_for("dense")["tp"], {"0": ColumnParallel()})
            except UserError as error:
                assert not isinstance(model[0].weight, DTensor)
                messages.append(str(error))
    return messages


def test_values_that_differ_between_the_ranks_of_the_axis_are_an_error() -> None:
    for (message,) in run_ranks(_own_values_per_rank, world_size=4):  # the axis has ranks 0 and 1, and ranks 2 and 3
        assert message.startswith("the values of 0.weight, 0.bias differ between the 2 ranks that would share them; ")


def _by_keyword() -> str:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        model = nn.Sequential(nn.Linear(4, 4))
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], {"0": ColumnParallel()})
        with pytest.raises(UserError) as caught:
            model[0](input=torch.ones(1, 4))
        return str(caught.value)


def test_activations_are_passed_by_position() -> None:
    message = (
        "ColumnParallel: the Linear was called without positional arguments; expected the activation as the first "
        "one. Pass it by position."
    )
    assert run_ranks(_by_keyword) == [message] * 2


def _smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)


def test_a_head_with_another_loss_needs_a_vocab_parallel_form() -> None:
    with MeshConfig().build() as ctx:
        model = _Model()
        model.head.token_loss = _smoothed
        with pytest.raises(UserError, match=r"a _Head whose token_loss is .*_smoothed.*; expected token_cross_entropy"):
            parallelize_tensor(model, ctx.mesh_for("dense")["tp"], {"head": VocabParallelHead()})


class _Smoothed:
    """A loss with a vocab-parallel form."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return _smoothed(logits, labels)

    def vocab_parallel(self, mesh: DeviceMesh) -> "_Smoothed":
        return _Smoothed(mesh)


def test_a_loss_with_a_vocab_parallel_form_is_used() -> None:
    with MeshConfig().build() as ctx:
        mesh, head = ctx.mesh_for("dense")["tp"], _Head()
        head.token_loss = _Smoothed()
        VocabParallelHead().prepare(head, mesh)
        assert isinstance(head.token_loss, _Smoothed)
        assert head.token_loss.mesh is mesh
        VocabParallelHead(token_loss=VocabParallelCrossEntropy).prepare(head, mesh)
        assert isinstance(head.token_loss, VocabParallelCrossEntropy)


def test_an_embedding_with_options_is_refused() -> None:
    with MeshConfig().build() as ctx:
        model = nn.Sequential(nn.Embedding(8, 4, padding_idx=0))
        with pytest.raises(UserError, match=r"an embedding with padding_idx = 0; expected it to be unset\."):
            parallelize_tensor(model, ctx.mesh_for("dense")["tp"], {"0": VocabParallelEmbedding()})


def _inference() -> bool:
    with MeshConfig(tensor_parallel=-1).build() as ctx, torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], {"0": ColumnParallel(), "1": RowParallel()})
        return bool(model(torch.ones(1, 4)).isfinite().all())


def test_the_first_forward_may_run_in_inference_mode() -> None:
    assert run_ranks(_inference) == [True, True]


def _computed_weights() -> list[str]:
    messages = []
    with MeshConfig(tensor_parallel=2).build() as ctx:
        for style in (ColumnParallel(), RowParallel()):
            model = nn.ModuleDict({"up": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))})
            with pytest.raises(UserError) as caught:
                parallelize_tensor(model, ctx.mesh_for("dense")["tp"], {"up": style})
            messages.append(str(caught.value))
    return messages


def test_a_parametrized_layer_is_not_split() -> None:
    for messages in run_ranks(_computed_weights, world_size=2):
        for message, style in zip(messages, ("ColumnParallel", "RowParallel"), strict=True):
            assert message.startswith("up is a ParametrizedLinear that computes its weight from other parameters")
            assert f"expected parameters of its own, which {style} shards. Remove the parametrization" in message
