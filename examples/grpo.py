"""Reinforcement learning with verifiable rewards (GRPO): additions of two one-digit numbers, written as bytes.

The script first trains a small decoder on additions whose results are mostly wrong. Then it samples answers, rewards
the correct ones, and trains on them. It prints the accuracy of the sampled answers, before and after, as JSON.
With `--rollouts URL`, rollout_server.py samples the answers; the script sends it the weights before each step.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from pretrain import Decoder
from pydantic import Field, PositiveInt
from rollout_client import RolloutClient
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import StageInfo
from d9d_loop import Engine, EngineConfig, Loss, Section, cli_main
from d9d_loop.losses import PolicyLoss, normalize_advantages, truncated_importance
from d9d_loop.tasks import PolicyTask
from d9d_modules import IGNORED_LABEL, QWEN3, Qwen3Params, generate

END = ord(";")
ANSWER = 3  # at most two digits, and the end


class Float64Decoder(Decoder):
    """Decoder in float64: layouts differ by rounding, which float32 amplifies over steps until samples differ."""

    def build(self, stage: StageInfo) -> nn.Module:
        return super().build(stage).double()


class Imitation(Section):
    steps: PositiveInt = 300
    batch_size: PositiveInt = 512
    learning_rate: float = 3e-3
    correct: float = Field(0.15, description="Fraction of correct results in the data.")


class GrpoConfig(EngineConfig):
    steps: PositiveInt = 80
    num_prompts: PositiveInt = 32
    num_answers: PositiveInt = 16
    learning_rate: float = 2e-3
    rollouts: str | None = Field(None, description="URL of a rollout server; null: this process samples.")
    model: Qwen3Params
    imitation: Imitation = Imitation()


def prompts(count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return S = `count` additions such as `3+4=`, int64 [S, 4], and their results [S]."""
    a, b = torch.randint(0, 10, (2, count), generator=draws)
    signs = torch.tensor([ord("+"), ord("=")]).expand(count, 2)
    return torch.stack((a + ord("0"), signs[:, 0], b + ord("0"), signs[:, 1]), 1), a + b


def write(results: Tensor) -> Tensor:
    """Return results as bytes [S, 3]: digits, the end, and padding."""
    texts = [f"{result};".ljust(ANSWER, ";") for result in results.tolist()]
    return torch.tensor([list(text.encode()) for text in texts])


def batch_of(tokens: Tensor) -> dict[str, Tensor]:
    """Return a batch of rows [S, L]; only the answers, up to their end, have labels."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    has_ended = (labels == END).cumsum(1) - (labels == END).long() > 0
    labels[has_ended] = IGNORED_LABEL
    labels[:, :-ANSWER] = IGNORED_LABEL
    return {
        "input_ids": inputs,
        "labels": labels,
        "position_ids": torch.arange(inputs.shape[1]).expand_as(inputs).contiguous(),
        "documents": torch.zeros_like(inputs),
    }


def imitation_loss(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Loss:
    return Loss.sum(-outputs["log_probs"], (batch["labels"] != IGNORED_LABEL).sum())


class Arithmetic:
    """Sampling and training on this rank's share of a batch."""

    def __init__(self, engine: Engine, config: GrpoConfig) -> None:
        self.engine, self.config = engine, config
        self.rank, self.num_ranks = engine.ctx.coordinate("batch", "dp"), engine.ctx.size("batch", "dp")
        self.draws = torch.Generator().manual_seed(config.seed)  # equal on all ranks
        self.policy = engine.for_generation()
        model = QWEN3.write(config.model)
        self.client = None if config.rollouts is None else RolloutClient(config.rollouts, engine, model)

    def own(self, values: Tensor) -> Tensor:
        return values.chunk(self.num_ranks)[self.rank]

    def imitate(self) -> None:
        """Train on additions with few correct results.

        The learning rate falls linearly, because a constant learning rate amplifies rounding.
        """
        settings = self.config.imitation
        for number in range(settings.steps):
            questions, results = prompts(settings.batch_size, self.draws)
            draws = torch.rand(len(results), generator=self.draws, dtype=torch.float64)
            is_correct = draws < settings.correct
            others = torch.randint(0, 19, results.shape, generator=self.draws)
            tokens = torch.cat((questions, write(torch.where(is_correct, results, others))), 1)
            self.engine.forward_backward([batch_of(self.own(tokens))], imitation_loss)
            self.engine.step(settings.learning_rate * (1 - number / settings.steps))

    def sample(self, questions: Tensor) -> dict[str, Tensor]:
        """Sample an answer to each question; return this rank's rows. The answers do not depend on the layout."""
        seeds = torch.randint(2**62, (len(questions),), generator=self.draws)
        if self.client is not None:
            return self.sample_remotely(self.client, questions, int(seeds[0]))
        found = generate(
            self.policy,
            self.own(questions).to(self.engine.ctx.device),
            max_new_tokens=ANSWER,
            max_context=questions.shape[1] + ANSWER,
            row_seeds=self.own(seeds),
        )
        return batch_of(found.token_ids.cpu())

    def sample_remotely(self, client: RolloutClient, questions: Tensor, seed: int) -> dict[str, Tensor]:
        """Sample on the server; its probabilities differ by rounding, which `importance` corrects."""
        client.send_weights()
        tokens, log_probs = map(self.own, client.sample(questions, num_tokens=ANSWER, seed=seed))
        batch = batch_of(tokens)
        (scores,) = self.engine.score([batch])
        batch["importance"] = truncated_importance(
            scores["log_probs"].cpu(),
            F.pad(log_probs, (questions.shape[1] - 1, 0)),
            mask_BL=batch["labels"] != IGNORED_LABEL,
            document_ids_BL=batch["documents"],
        )
        return batch

    def step(self, task: PolicyTask) -> float:
        """Sample answers, reward the correct ones, and train on them; return the fraction of correct answers."""
        config = self.config
        questions, results = (
            each.repeat_interleave(config.num_answers, 0) for each in prompts(config.num_prompts, self.draws)
        )
        batch = self.sample(questions)
        expected = batch_of(torch.cat((self.own(questions), write(self.own(results))), 1))
        rewards = (batch["labels"] == expected["labels"]).all(1).float()
        group = self.engine.ctx.group_for("batch", "dp")
        prompt_ids = self.own(torch.arange(config.num_prompts).repeat_interleave(config.num_answers))
        advantages = normalize_advantages(rewards, prompt_ids, num_prompts=config.num_prompts, group=group)
        batch["advantages"] = advantages.unsqueeze(1).expand_as(batch["labels"]).contiguous()
        self.engine.forward_backward([batch], task.loss)
        self.engine.step(config.learning_rate)
        torch.distributed.all_reduce(total := rewards.sum(), group=group)
        return total.item() / len(questions)


def main() -> None:
    config = GrpoConfig.from_cli(Path(__file__).with_suffix(".toml"))
    task = PolicyTask(PolicyLoss())
    decoder = Float64Decoder if config.rollouts is None else Decoder  # the server uses float32
    with Engine.open(config, model=decoder(config.model), task=task) as engine:
        start = time.process_time()
        arithmetic = Arithmetic(engine, config)
        arithmetic.imitate()
        curve = []
        for number in range(config.steps):
            curve.append(arithmetic.step(task))
            if engine.ctx.is_main_process and number % 10 == 0:
                print(f"step {number}: {curve[-1]:.0%} of the answers are correct", flush=True)
        if engine.ctx.is_main_process:
            seconds = round(time.process_time() - start, 1)
            print(json.dumps({"first": curve[0], "last": curve[-1], "processor_seconds": seconds, "curve": curve}))


if __name__ == "__main__":
    with cli_main():
        main()
