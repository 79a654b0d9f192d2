"""The rollout server: weights arrive exactly, answers are corrected for its probabilities, errors are clear."""

import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any, cast

import grpo
import pytest
import torch
from jobs import EXAMPLES, on_ranks, options
from rollout_client import RolloutClient
from rollout_server import Handler, RequestError, Rollouts, serve
from torch import Tensor

from d9d_dist.testing import run_ranks
from d9d_loop import Engine
from d9d_loop.tasks import PolicyTask
from d9d_modules import QWEN3

SHORT = {"imitation.steps": 2, "imitation.batch_size": 32, "num_prompts": 4, "num_answers": 4, "steps": 2}


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    """Serve in a thread of this process; the trainer's ranks are other processes."""
    listening = serve(0)
    thread = Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}", cast("type[Handler]", listening.RequestHandlerClass)
    listening.shutdown()
    listening.server_close()
    thread.join()


class _Shifted:
    """Client whose server reports probabilities that are lower by a factor e^0.5, but 0.7 for the first token."""

    def __init__(self, client: RolloutClient, arithmetic: grpo.Arithmetic) -> None:
        self._client, self._arithmetic = client, arithmetic

    def send_weights(self) -> int:
        return self._client.send_weights()

    def sample(self, prompts: Tensor, *, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        tokens, log_probs = self._client.sample(prompts, num_tokens=num_tokens, seed=seed)
        return tokens, log_probs - torch.tensor([0.7, 0.5, 0.5])


def _hand_over(url: str, folder: Path, mesh: dict[str, int]) -> dict[str, Any]:
    """Send weights and sample on a rank."""
    arguments = options({"run.folder": folder, "rollouts": url, "seed": 3}, {f"mesh.{k}": v for k, v in mesh.items()})
    config = grpo.GrpoConfig.from_cli(EXAMPLES / "grpo.toml", arguments)
    with Engine.open(config, model=grpo.Decoder(config.model), task=PolicyTask()) as engine:
        arithmetic = grpo.Arithmetic(engine, config)
        client = arithmetic.client
        assert client is not None
        questions, _ = grpo.prompts(8, arithmetic.draws)
        plain = arithmetic.sample_remotely(client, questions, seed=5)
        shifted = arithmetic.sample_remotely(cast("Any", _Shifted(client, arithmetic)), questions, seed=5)
        moved = client.send_weights()
        weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return {"moved": moved, "bound": client.num_bytes, "weights": weights, "plain": plain, "shifted": shifted}


def _check(ranks: list[dict[str, Any]], held: dict[str, Tensor], num_dp: int) -> None:
    sent: dict[str, Tensor] = {}
    for rank in ranks:
        sent |= rank["weights"]
    assert sent.keys() == held.keys()
    assert all(torch.equal(tensor, held[name]) for name, tensor in sent.items())
    for rank in ranks:
        assert rank["moved"] == rank["bound"] == sum(tensor.nbytes for tensor in held.values())
        labels = rank["plain"]["labels"]
        assert len(labels) == 8 // num_dp
        assert torch.equal(labels, rank["shifted"]["labels"])  # the seed decides
        is_answer = labels != -100
        assert is_answer[:, 3].all()
        ratio = torch.where(is_answer, rank["shifted"]["importance"].log(), 0.0)
        expected = torch.where(is_answer, torch.tensor([0.0, 0.0, 0.0, torch.tensor(2.0).log(), 0.5, 0.5]), 0.0)
        # Two implementations in float32: their log-probabilities differ by rounding. 0.7 is truncated to log 2.
        torch.testing.assert_close(ratio, expected, rtol=0, atol=2e-4)
        torch.testing.assert_close(rank["plain"]["importance"], torch.ones_like(ratio), rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        pytest.param({"pipeline_parallel": 2, "data_parallel_shard": 2}, marks=pytest.mark.full),
        pytest.param({"tensor_parallel": 2, "data_parallel_replicate": 2}, marks=pytest.mark.full),
    ],
    ids=["one", "pp-dp", "tp-dp"],
)
def test_weights_arrive_exactly_and_probabilities_are_corrected(
    server: tuple[str, type[Handler]], tmp_path: Path, mesh: dict[str, int]
) -> None:
    url, handler = server
    world_size = torch.Size(mesh.values()).numel()
    ranks = run_ranks(_hand_over, url, tmp_path, mesh, world_size=world_size)
    held = {name: tensor.detach() for name, tensor in handler.rollouts.model.named_parameters()}
    _check(ranks, held, num_dp=mesh.get("data_parallel_shard", 1) * mesh.get("data_parallel_replicate", 1))


def test_grpo_learns_from_answers_of_the_server(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    (ended,) = on_ranks("grpo", options({"run.folder": tmp_path, "rollouts": server[0]}, SHORT))
    assert ended.code == 0, ended.errors
    assert len(ended.summary["curve"]) == 2


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_without_a_server_there_is_one_clear_error(tmp_path: Path, world_size: int) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        mesh = {"mesh.data_parallel_shard": world_size}
        ranks = on_ranks("grpo", options({"run.folder": tmp_path, "rollouts": url}, SHORT, mesh), world_size=world_size)
    assert all(ended.code for ended in ranks)
    error = (
        f"no rollout server answers at {url}: [Errno 111] Connection refused; expected one. Start it on this machine"
    )
    assert error in ranks[0].errors


def test_the_server_refuses_weights_that_do_not_fit(tmp_path: Path) -> None:
    rollouts = Rollouts()
    with pytest.raises(RequestError, match="there is no model; expected a POST of its config"):
        rollouts.load({})
    params = grpo.GrpoConfig.from_cli(EXAMPLES / "grpo.toml", []).model
    rollouts.open(dict(QWEN3.write(params)))
    asked = {"version": 1, "prompts": [[51, 43, 52, 61]], "num_tokens": 3, "seed": 0}
    with pytest.raises(RequestError, match=r"version 1 of the weights has no model\.embed_tokens\.weight"):
        rollouts.generate(asked)
    path = tmp_path / "weights"
    path.write_bytes(bytes(64))
    embedding = {"name": "model.embed_tokens.weight", "dtype": "torch.float32", "shape": [64, 64]}
    sent = {"version": 1, "path": str(path)}
    with pytest.raises(
        RequestError, match=r"got model\.embed_tokens\.weight as torch\.float16 .*; expected torch.float32"
    ):
        rollouts.load({**sent, "tensors": [{**embedding, "dtype": "torch.float16"}]})
    with pytest.raises(RequestError, match=r"got head as torch\.float32 .*; expected no such weight"):
        rollouts.load({**sent, "tensors": [{**embedding, "name": "head"}]})
    with pytest.raises(RequestError, match="the shared memory ends within"):
        rollouts.load({**sent, "tensors": [embedding]})
