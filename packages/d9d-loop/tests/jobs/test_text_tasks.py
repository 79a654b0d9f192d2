from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from d9d_loop.jobs.text_tasks import Embed, Pooling
from d9d_metrics import WeightedMean

GROUPS, PAIRS, NEGATIVES, LENGTH, WIDTH = 3, 4, 2, 5, 8
TEXTS = 2 * PAIRS + NEGATIVES


def _embedding(states: Tensor, count: int, pooling: str) -> Tensor:
    kept = states[:count]
    chosen = {"mean": kept.mean(0), "last": kept[-1], "first": kept[0]}[pooling]
    return chosen / chosen.norm()


def _expected(outputs: Tensor, batch: dict[str, Tensor], pooling: str, temperature: float) -> tuple[float, int]:
    """Compute the loss and the number of right queries, text by text."""
    total, num_right = 0.0, 0
    for group in range(GROUPS):
        lengths = batch["attention_mask"][group].sum(-1).tolist()
        texts = [batch["input_ids"][group, n, :count].tolist() for n, count in enumerate(lengths)]
        found = [_embedding(outputs[group * TEXTS + n], count, pooling) for n, count in enumerate(lengths)]
        for query in range(PAIRS):
            own = PAIRS + query
            others = [n for n in range(PAIRS, TEXTS) if n != own and texts[n] != texts[own]]
            scores = torch.stack([found[query] @ found[n] for n in [own, *others]]) / temperature
            total += (scores.logsumexp(0) - scores[0]).item()
            num_right += int(scores.argmax() == 0)
    return total, num_right


@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
def test_loss_and_accuracy_equal_a_loop_over_texts(pooling: Pooling) -> None:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, LENGTH + 1, (GROUPS, TEXTS, 1), generator=random)
    mask = (torch.arange(LENGTH) < lengths).long()
    ids = torch.randint(1, 99, (GROUPS, TEXTS, LENGTH), generator=random) * mask
    for copy in (PAIRS + 1, TEXTS - 1):  # the document of the first query, twice more
        ids[0, copy], mask[0, copy] = ids[0, PAIRS], mask[0, PAIRS]
    batch = {"input_ids": ids, "attention_mask": mask}
    states = torch.randn(GROUPS * TEXTS, LENGTH, WIDTH, generator=random)
    outputs: Any = SimpleNamespace(last_hidden_state=states)
    task = Embed(num_pairs=PAIRS, pooling=pooling, temperature=0.3)
    assert task.inputs(batch)["input_ids"].shape == (GROUPS * TEXTS, LENGTH)
    loss = task.loss(outputs, batch)
    total, num_right = _expected(states, batch, pooling, 0.3)
    assert loss.total.item() == pytest.approx(total, rel=1e-5)
    assert loss.weight == GROUPS * PAIRS
    accuracy = WeightedMean()
    task.update_metrics({"accuracy": accuracy}, outputs=outputs, batch=batch, loss=loss)
    assert accuracy.compute() == pytest.approx(num_right / (GROUPS * PAIRS))
