from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from d9d_loop.jobs.text_tasks import POSITIONS, Embed, NextToken, Pooling, Prefer, label_positions
from d9d_loop.losses import PreferenceLoss
from d9d_metrics import WeightedMean

GROUPS, PAIRS, NEGATIVES, LENGTH, WIDTH = 3, 4, 1, 5, 8
TEXTS = (2 + NEGATIVES) * PAIRS
NUM_PAIRS = [PAIRS, 3, 1]


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
        for query in range(NUM_PAIRS[group]):
            own = PAIRS + query
            documents = [kind * PAIRS + pair for kind in (1, 2) for pair in range(NUM_PAIRS[group])]
            others = [n for n in documents if n != own and texts[n] != texts[own]]
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
    for text in range(PAIRS, TEXTS):  # the padding of the last group repeats its only pair
        first = text // PAIRS * PAIRS
        ids[2, text], mask[2, text] = ids[2, first], mask[2, first]
    batch = {"input_ids": ids, "attention_mask": mask, "num_pairs": torch.tensor(NUM_PAIRS)}
    states = torch.randn(GROUPS * TEXTS, LENGTH, WIDTH, generator=random, requires_grad=True)
    outputs: Any = SimpleNamespace(last_hidden_state=states)
    task = Embed(num_pairs=PAIRS, pooling=pooling, temperature=0.3)
    assert task.inputs(batch)["input_ids"].shape == (GROUPS * TEXTS, LENGTH)
    loss = task.loss(outputs, batch)
    total, num_right = _expected(states, batch, pooling, 0.3)
    assert loss.total.item() == pytest.approx(total, rel=1e-5)
    assert loss.weight == sum(NUM_PAIRS)
    loss.total.backward()
    assert states.grad is not None
    is_padding = torch.tensor([[text % PAIRS >= num for text in range(TEXTS)] for num in NUM_PAIRS]).flatten()
    assert states.grad[is_padding].abs().sum() == 0
    assert states.grad[~is_padding].isfinite().all()
    accuracy = WeightedMean()
    task.update_metrics({"accuracy": accuracy}, outputs=outputs, batch=batch, loss=loss)
    assert accuracy.compute() == pytest.approx(num_right / sum(NUM_PAIRS))


LABELS = torch.tensor([[-100, 3, -100, 1], [-100] * 4, [2, -100, -100, -100], [-100, 0, 4, -100]])
"""Labels of rows with two labels, none, one, and two."""


def test_positions_are_those_of_labels_and_of_as_many_others_as_a_row_needs() -> None:
    assert label_positions(LABELS).tolist() == [[1, 3], [0, 1], [0, 1], [1, 2]]
    assert label_positions(LABELS[1:2]).tolist() == [[0]]
    assert label_positions(LABELS.unflatten(0, (2, 2)), 9).tolist() == [[[0, 1, 2, 3]] * 2] * 2


def test_rows_have_few_numbers_of_positions() -> None:
    """Pipeline stages exchange shapes anew for each of them."""
    labels = torch.full((40, 40), -100)
    numbers = {label_positions(labels.index_fill(1, torch.arange(num), 1)).shape[-1] for num in range(41)}
    assert numbers == {*range(3, 40, 3), 40}


def _outputs(task: Any, batch: dict[str, Tensor], logits: Tensor) -> Any:
    """Return the outputs of a model of `transformers` that computes the logits of all positions, or of given ones."""
    kept = task.inputs(batch).get("logits_to_keep")
    logits = logits if kept is None else logits.take_along_dim(kept[..., None], dim=1)
    return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("kind", ["next token", "pairs"])
def test_losses_gradients_and_values_of_labels_equal_those_of_all_logits(kind: str) -> None:
    logits = torch.randn(4, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = LABELS if kind == "next token" else LABELS.unflatten(0, (2, 2))
    batch = {"input_ids": labels.clamp(min=0), "labels": labels, POSITIONS: label_positions(labels)}
    found: list[list[Tensor]] = []
    for label_logits in (False, True):
        task: Any = {
            "next token": NextToken(label_logits=label_logits),
            "pairs": Prefer(PreferenceLoss(length_normalized=True), has_reference=False, label_logits=label_logits),
        }[kind]
        outputs = _outputs(task, batch, logits)
        assert outputs.logits.shape[1] == (2 if label_logits else 4)
        loss = task.loss(outputs, batch)
        values = [loss.total.detach(), torch.as_tensor(loss.weight), *torch.autograd.grad(loss.total, logits)]
        if kind == "next token":
            values += [*task.predictions(outputs, batch).values(), *task.scores(outputs, batch).values()]
        else:
            values += task.reference_values(outputs, batch).values()
        found.append([each.detach() for each in values])
    for whole, of_labels in zip(*found, strict=True):
        assert whole.shape == of_labels.shape
        assert whole.abs().sum() > 0
        torch.testing.assert_close(of_labels, whole, rtol=1e-14, atol=1e-15)
