"""A step on an accelerator, rehearsed without one: where the host waits, what overlaps, and that faults are seen."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from device_jobs import TINY, TINY_EXPERTS, Case, rehearsed
from fake_accelerator import DeviceLog, StreamOrder, why_no_fake_accelerator

from d9d_loop.config._config_keys import kinds_of
from d9d_loop.engine.engine import Engine
from d9d_loop.optimizers.optimizer import OptimizerConfig

pytestmark = pytest.mark.skipif(why_no_fake_accelerator() is not None, reason=str(why_no_fake_accelerator()))

KNOWN_WAITS = {
    "visibility.py document_runs": "lengths of packed documents, for variable-length attention",
    "bad_steps.py wait": "the decision on the step before, one step late",
    "all_to_all.py _sizes": "numbers of tokens to send and receive, which size the all-to-all and its buffers",
    "sync.py read_values": "metrics, read by the thread that delivers them",
}
"""Functions in which the host may wait for the device, with the reason."""

_BYTES_OF_RATES = 4 * 8
"""Bytes of `Same.on_host` in float64: copied from pinned memory, without a wait."""

_VECTORS = {"of": "vectors", "optimizer": {"kind": "adamw"}}
FSDP = Case(mesh={"data_parallel_shard": 8}, world_size=8)
LAYOUTS = {
    "fsdp": FSDP,
    "fsdp, data read by the process": replace(FSDP, num_workers=0),
    "fsdp, packed documents": replace(FSDP, documents=True),
    "fsdp, rank 1000 of 1024": Case(mesh={"data_parallel_shard": 1024}, world_size=1024, rank=1000),
    "hsdp": Case(mesh={"data_parallel_shard": 2, "data_parallel_replicate": 2}, world_size=4),
    "tp": Case(mesh={"tensor_parallel": 2}, world_size=2),
    "cp": Case(mesh={"context_parallel_shard": 2}, world_size=2),
    "cp, ring": Case(
        mesh={"context_parallel_shard": 4}, world_size=4, settings={"parallelism": {"context_method": "ring"}}
    ),
    "fsdp, varlen": replace(FSDP, documents=True, attention="varlen"),
    "fsdp, recipe": replace(FSDP, recipe=True),
    "fsdp, tied": replace(FSDP, model=TINY | {"tie_word_embeddings": True}),
    "ep": Case(mesh={"data_parallel_shard": 4, "expert_parallel": 4}, world_size=4, experts=TINY_EXPERTS),
    "moe": Case(mesh={"data_parallel_shard": 4}, world_size=4, experts=TINY_EXPERTS),
    "pp": Case(mesh={"pipeline_parallel": 2}, world_size=2, num_microbatches=4),
    "pp, last rank": Case(mesh={"pipeline_parallel": 2}, world_size=2, rank=1, num_microbatches=4),
    **{kind: replace(FSDP, settings={"optimizer": {"kind": kind}}) for kind in kinds_of(OptimizerConfig)},
    "muon": replace(FSDP, settings={"optimizer": {"kind": "muon", "groups": [_VECTORS]}}),
}
EXPOSED_GATHERS = {
    # The norm, the embedding and the first layer; and the head, which backward needs at once and gathers again.
    "fsdp, recipe": [0, 1, 2, 7],
    # The backward pass of a layer starts with its experts, which FSDP gathers only once the layer is reached.
    "moe": [0, 1, 9, 11, 13],
}
"""Indices of all-gathers beside which no matrix product can run, where there are more than the first two."""

# The late all-gathers of experts are queued behind these reduce-scatters.
EXPOSED_SCATTERS = {"moe": [1, 3, 5, 6], "fsdp, recipe": [3, 4, 5]}
"""Indices of reduce-scatters beside which no matrix product can run, where there are more than the last two."""

_DEFAULT = ("fsdp", "ep", "pp")


def _plant_item(engine: Engine) -> None:
    def read(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        output.sum().item()

    engine.model.get_submodule("backbone.layers.1").register_forward_hook(read)


def _plant_copy(engine: Engine) -> None:
    def copied(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[0].add_(torch.zeros(args[0].shape[-1:]).to(args[0].device, non_blocking=True))  # pageable memory

    engine.model.get_submodule("backbone.norm").register_forward_pre_hook(copied)


def _prevent_prefetch(engine: Engine) -> None:
    """Let each all-gather wait for the layer before it, as if nothing was gathered ahead."""

    def wait(module: Any, *_: Any) -> None:
        state = module._get_fsdp_state()
        for stream in (state._comm_ctx.all_gather_copy_in_stream, state._comm_ctx.all_gather_stream):
            stream.wait_stream(torch.accelerator.current_stream())

    for block in engine.model.get_submodule("backbone.layers").children():
        block.register_forward_pre_hook(wait, prepend=True)


def _waits(log: DeviceLog) -> Counter[str]:
    """Return the number of host waits by file and function, such as "bad_steps.py wait"."""
    places = [next(frame for frame in wait.stack if frame.startswith(_PACKAGES)) for wait in log.host_waits]
    return Counter(f"{place.rpartition('/')[2].partition(':')[0]} {place.rpartition(' ')[2]}" for place in places)


_PACKAGES = (
    "d9d_",
    "attention_backends/",
    "resilience/",
    "engine/",
    "checkpoint/",
    "job/",
    "data/",
    "integration_tests/",
    "optimizers/",
)


def _expected_waits(case: Case) -> dict[str, int]:
    num_layers = case.model["num_layers"] // case.mesh.get("pipeline_parallel", 1)
    exchanges = num_layers * case.num_microbatches if case.mesh.get("expert_parallel", 1) > 1 else 0
    waits = {"bad_steps.py wait": 1} | ({"all_to_all.py _sizes": exchanges} if exchanges else {})
    # Once for all layers of a batch.
    return waits | ({"visibility.py document_runs": case.num_microbatches} if case.attention == "varlen" else {})


def _check_layout(name: str, log: DeviceLog) -> None:
    case = LAYOUTS[name]
    waits = _waits(log)
    assert waits == _expected_waits(case), f"{name}: {[(wait.name, wait.stack[:6]) for wait in log.host_waits]}"
    assert set(waits) <= set(KNOWN_WAITS)
    _check_inputs(name, log)
    if "data_parallel_shard" in case.mesh:
        _check_fsdp(name, log, num_layers=case.model["num_layers"])
    if "pipeline_parallel" in case.mesh:
        _check_transfers(name, log, num_microbatches=case.num_microbatches)
    if name == "cp, ring":
        _check_ring(log, num_ranks=case.world_size, num_layers=case.model["num_layers"])
    if name == "tp":
        _check_loss(log, case)


def _check_inputs(name: str, log: DeviceLog) -> None:
    """Input copies are on a stream of their own if a thread prefetches.

    Nothing else is copied from the host, except the learning rates of the step, which ranks compare.
    """
    copies = log.of("copy in")
    rates = [entry for entry in copies if entry.stream == 0 and entry.num_bytes == _BYTES_OF_RATES]
    assert len(rates) == 1, f"{name}: {rates}"
    streams = {entry.stream for entry in copies if entry is not rates[0]}
    assert streams, name
    copies_lengths = LAYOUTS[name].attention == "varlen"  # from pinned memory, once for a batch
    assert (0 in streams) == (LAYOUTS[name].num_workers == 0 or copies_lengths), (
        f"{name}: inputs are copied on streams {streams}"
    )


def _check_fsdp(name: str, log: DeviceLog, *, num_layers: int) -> None:
    """All-gathers can run beside matrix products, except the root's and the first layer's in forward."""
    order = StreamOrder(log)
    gathers = log.of("collective", name="all_gather")
    exposed = [index for index, gather in enumerate(gathers) if not order.beside(gather, name="mm")]
    assert exposed == EXPOSED_GATHERS.get(name, [0, 1]), (
        f"{name}: all-gathers {exposed} of {len(gathers)} overlap with nothing"
    )
    scatters = log.of("collective", name="reduce_scatter")
    blocked = [index for index, scatter in enumerate(scatters) if not order.beside(scatter, name="mm")]
    # The last layer's in backward order and the root's: no matrix product is left.
    assert blocked == EXPOSED_SCATTERS.get(name, [num_layers - 1, num_layers]), (
        f"{name}: reduce-scatters {blocked} of {len(scatters)}"
    )
    assert all(entry.stream != 0 for entry in (*gathers, *scatters))


def _check_transfers(name: str, log: DeviceLog, *, num_microbatches: int) -> None:
    """Sends and receives are on streams of their own, and all but those of warm-up and cool-down can overlap."""
    order, transfers = StreamOrder(log), [*log.of("collective", name="send"), *log.of("collective", name="recv")]
    assert len(transfers) == 2 * num_microbatches
    assert all(entry.stream != 0 for entry in transfers)
    sends = log.of("collective", name="send")
    hidden = [entry for entry in sends if order.beside(entry, name="mm")]
    # The last rank sends a gradient, then receives on the stream of the same peer, and needs what it receives.
    assert len(hidden) >= (1 if "last" in name else len(sends) - 1), (
        f"{name}: {len(hidden)} of {len(sends)} sends overlap with matrix products"
    )


def _check_ring(log: DeviceLog, *, num_ranks: int, num_layers: int) -> None:
    """Keys and values travel beside attention to those before, also in backward. Gradients do so but in the last step.

    Forward sends R - 1 times, backward R - 1 times keys and values and R times their gradients; each time two tensors.
    """
    order, sends = StreamOrder(log), log.of("collective", name="send")
    assert len(sends) == num_layers * 2 * (3 * num_ranks - 2)
    exposed = [send for send in sends if not order.beside(send, name="attention")]
    assert len(exposed) == num_layers * 2, [send.stack[:3] for send in exposed]
    assert all("backward" in send.stack[1] for send in exposed)


def _check_loss(log: DeviceLog, case: Case) -> None:
    """No collective is as large as the logits of a rank, which are those of its half of the vocabulary."""
    of_bfloat16 = 2 * case.length * case.model["vocab_size"] // 2
    assert max(entry.num_bytes for entry in log.of("collective")) < of_bfloat16


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [_DEFAULT, *((n,) for n in LAYOUTS if n not in _DEFAULT)],
    ids=", ".join,
)
def test_the_host_waits_only_where_expected_and_communication_overlaps(names: tuple[str, ...]) -> None:
    for name, log in rehearsed({name: LAYOUTS[name] for name in names}).items():
        _check_layout(name, log)


@pytest.mark.full
@pytest.mark.long
def test_planted_faults_are_detected() -> None:
    mutants = {"item": _plant_item, "copy": _plant_copy, "prefetch": _prevent_prefetch}
    logs = rehearsed({name: replace(FSDP, mutant=mutant) for name, mutant in mutants.items()})
    assert _waits(logs["item"])["test_device_rehearsal.py read"] == 1
    assert _waits(logs["copy"])["test_device_rehearsal.py copied"] == 1
    with pytest.raises(AssertionError, match="overlap with nothing"):
        _check_fsdp("prefetch", logs["prefetch"], num_layers=3)


def test_a_job_waits_for_nothing_but_decisions_and_metrics_while_a_checkpoint_is_saved() -> None:
    log = rehearsed({"job": Case()}, whole_jobs=True)["job"]
    assert set(_waits(log)) <= {"bad_steps.py wait", "sync.py read_values"}, [
        (wait.name, wait.stack[:6]) for wait in log.host_waits
    ]


@pytest.mark.full
def test_head_layers_balance_the_pipeline() -> None:
    """The head costs 4.7 layers: 8 V D operations a token, and a layer 6 for each parameter and some for attention."""
    wide = TINY | {"num_layers": 8, "vocab_size": 2048}
    cases = {
        f"{layers} {rank}": replace(LAYOUTS["pp"], rank=rank, model=wide | {"head_layers": layers})
        for layers in (0, 4)
        for rank in (0, 1)
    }
    flops = {name: log.flops for name, log in rehearsed(cases).items()}
    assert flops["0 1"] > 1.7 * flops["0 0"]
    assert 0.85 < flops["4 1"] / flops["4 0"] < 1.2


@pytest.mark.full
def test_packed_documents_cost_no_kernels_per_layer_beyond_the_first() -> None:
    """The block mask of FlexAttention is built once for a batch. Before, each layer launched 55 kernels for it."""
    cases = {
        f"{num_layers} {documents}": replace(
            FSDP, model=TINY | {"num_layers": num_layers}, documents=documents == "packed"
        )
        for num_layers in (2, 4)
        for documents in ("packed", "one")
    }
    kernels = {name: len(log.of("kernel")) for name, log in rehearsed(cases).items()}
    assert kernels["4 packed"] - kernels["2 packed"] == kernels["4 one"] - kernels["2 one"]
    assert kernels["2 packed"] > kernels["2 one"]


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(AssertionError, match="Expected all tensors to be on the same device"):
        rehearsed({"mixed": replace(FSDP, mutant=_plant_cpu_tensor)})


def _plant_cpu_tensor(engine: Engine) -> None:
    engine.model.get_submodule("backbone.norm").register_forward_pre_hook(lambda module, args: args[0] + torch.ones(64))
