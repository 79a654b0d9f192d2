import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_metrics import (
    BinaryClassification,
    ConfusionMatrix,
    MulticlassClassification,
    MultilabelClassification,
    accuracy,
    compute_metrics,
    f_beta,
    precision,
    recall,
)
from d9d_metrics.confusion_scores import Average, Score

AVERAGES: tuple[Average, ...] = ("micro", "macro", "weighted", None)
SCORES: dict[str, Score] = {
    f"{kind}-{average}": make(average)
    for average in AVERAGES
    for kind, make in {
        "precision": precision,
        "recall": recall,
        "f1": lambda average: f_beta(1.0, average),
        "f2": lambda average: f_beta(2.0, average),
    }.items()
}


def of_sklearn(truth: np.ndarray, answers: np.ndarray, labels: list[int]) -> dict[str, np.ndarray]:
    """Return every score of `SCORES`, computed by scikit-learn."""
    from sklearn import metrics as sk

    found = {}
    for average in AVERAGES:
        for kind, beta in [("f1", 1.0), ("f2", 2.0)]:
            prec, rec, found[f"{kind}-{average}"], _ = sk.precision_recall_fscore_support(
                truth, answers, beta=beta, average=average, labels=labels, zero_division=0
            )
            found[f"precision-{average}"], found[f"recall-{average}"] = prec, rec
    return found


def assert_same(computed: dict[str, torch.Tensor], expected: dict[str, np.ndarray]) -> None:
    assert computed.keys() == expected.keys()
    for name, value in computed.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=1e-12, atol=1e-12, err_msg=name)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), num_samples=st.integers(1, 40), num_classes=st.integers(2, 6), data=st.data())
def test_multiclass_equals_scikit_learn(seed: int, num_samples: int, num_classes: int, data: st.DataObject) -> None:
    from sklearn import metrics as sk

    top_k = data.draw(st.integers(1, num_classes))
    draws = torch.Generator().manual_seed(seed)
    # Few distinct predictions, so that there are ties.
    predictions = torch.randint(0, 4, (num_samples, num_classes), generator=draws).float()
    targets = torch.randint(0, num_classes, (num_samples,), generator=draws)
    scores = {**SCORES, "accuracy": accuracy(), "balanced": accuracy("macro"), "per class": accuracy(None)}
    metric, matrix = MulticlassClassification(num_classes, scores, top_k=top_k), ConfusionMatrix(num_classes)
    half = num_samples // 2
    for part in (slice(half), slice(half, None)):
        metric.update(predictions[part], targets[part])
        matrix.update(predictions[part], targets[part])
    order = np.argsort(-predictions.numpy(), axis=-1, kind="stable")[:, :top_k]
    truth = targets.numpy()
    answers = np.where((order == truth[:, None]).any(-1), truth, order[:, 0])
    labels = list(range(num_classes))
    expected = of_sklearn(truth, answers, labels)
    expected["accuracy"] = np.asarray(sk.accuracy_score(truth, answers))
    expected["per class"] = expected["recall-None"]
    # The expected recall is over classes with samples; the others have no score.
    expected["balanced"] = np.asarray(sk.recall_score(truth, answers, labels=np.unique(truth), average="macro"))
    assert_same(metric.compute(), expected)
    best = sk.confusion_matrix(truth, order[:, 0], labels=labels)
    assert matrix.compute().tolist() == best.tolist()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # about predicted classes without samples
        balanced = sk.balanced_accuracy_score(truth, answers)
    assert metric.compute()["balanced"].item() == pytest.approx(balanced, rel=1e-12)
    distinct = predictions + torch.rand(predictions.shape, generator=draws) / 2
    if num_classes > 2 and top_k < num_classes:
        metric.reset()
        metric.update(distinct, targets)
        top = sk.top_k_accuracy_score(truth, distinct.numpy(), k=top_k, labels=labels)
        assert metric.compute()["accuracy"].item() == pytest.approx(top, rel=1e-12)


@pytest.mark.parametrize(("dtype", "num_classes"), [(torch.uint8, 256), (torch.uint8, 300), (torch.int8, 128)])
def test_targets_may_be_of_a_dtype_that_does_not_hold_the_number_of_classes(
    dtype: torch.dtype, num_classes: int
) -> None:
    targets = torch.tensor([7, 120, 7], dtype=dtype)
    scores = torch.eye(num_classes)[[7, 120, 5]]
    metric, matrix = MulticlassClassification(num_classes, {"accuracy": accuracy()}), ConfusionMatrix(num_classes)
    metric.update(scores, targets)
    matrix.update(scores, targets)
    assert metric.compute()["accuracy"].item() == 2 / 3
    assert matrix.compute()[[7, 120, 7], [7, 120, 5]].tolist() == [1, 1, 1]


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), num_samples=st.integers(1, 40), num_labels=st.integers(2, 5))
def test_multilabel_equals_scikit_learn(seed: int, num_samples: int, num_labels: int) -> None:
    from sklearn import metrics as sk

    draws = torch.Generator().manual_seed(seed)
    probabilities = torch.rand(num_samples, num_labels, generator=draws)
    targets = torch.rand(num_samples, num_labels, generator=draws) > 0.6
    metric = MultilabelClassification(
        num_labels, {**SCORES, "accuracy": accuracy(), "per label": accuracy(None)}, threshold=0.4
    )
    metric.update(probabilities, targets)
    truth, answers = targets.numpy().astype(int), (probabilities > 0.4).numpy().astype(int)
    expected = of_sklearn(truth, answers, list(range(num_labels)))
    expected["accuracy"] = np.asarray(1 - sk.hamming_loss(truth, answers))
    expected["per label"] = np.array([sk.accuracy_score(truth[:, i], answers[:, i]) for i in range(num_labels)])
    assert_same(metric.compute(), expected)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), shape=st.sampled_from([(1,), (30,), (4, 5)]))
def test_binary_equals_scikit_learn(seed: int, shape: tuple[int, ...]) -> None:
    from sklearn import metrics as sk

    draws = torch.Generator().manual_seed(seed)
    logits, targets = torch.randn(shape, generator=draws), torch.randint(0, 2, shape, generator=draws)
    scores = {"p": precision(), "r": recall(), "f": f_beta(0.5), "a": accuracy()}
    metric = BinaryClassification(scores, threshold=0.0)
    metric.update(logits, targets)
    truth, answers = targets.flatten().numpy(), (logits > 0).flatten().numpy()
    prec, rec, f, _ = sk.precision_recall_fscore_support(truth, answers, beta=0.5, average="binary", zero_division=0)
    expected = {"p": prec, "r": rec, "f": f, "a": sk.accuracy_score(truth, answers)}
    assert compute_metrics({"m": metric}, None) == pytest.approx({f"m/{k}": v for k, v in expected.items()}, rel=1e-12)


def test_logits_are_no_probabilities() -> None:
    """With the threshold of a probability, a logit of 0.3 would be negative, though its probability is 0.57."""
    scores, logits, targets = {"accuracy": accuracy()}, torch.tensor([0.3, -2.0]), torch.tensor([1, 0])
    for threshold, predictions, expected in ((0.5, logits, math.nan), (0.0, logits, 1.0), (0.5, logits.sigmoid(), 1.0)):
        for metric, shape in (
            (BinaryClassification(scores, threshold=threshold), (2,)),
            (MultilabelClassification(2, scores, threshold=threshold), (1, 2)),
        ):
            metric.update(predictions.view(shape), targets.view(shape))
            assert str(metric.compute()["accuracy"].item()) == str(expected)


def test_masked_samples_are_ignored_whatever_their_values() -> None:
    mask = torch.tensor([True, False, True])
    targets = torch.tensor([0, -100, 2])
    predictions = torch.eye(3)
    metric, matrix = MulticlassClassification(3, {"a": accuracy()}), ConfusionMatrix(3)
    metric.update(predictions, targets, mask)
    matrix.update(predictions, targets, mask)
    assert metric.compute()["a"].item() == 1.0
    assert matrix.compute().tolist() == [[1.0, 0, 0], [0, 0, 0], [0, 0, 1.0]]
    labels = MultilabelClassification(2, {"a": accuracy(), "r": recall()})
    labels.update(torch.tensor([[0.9, 0.1], [0.9, 0.9]]), torch.tensor([[1, 0], [0, 0]]), torch.tensor([True, False]))
    assert labels.compute()["a"].item() == 1.0


def test_scores_without_data_are_zero() -> None:
    metric = MulticlassClassification(3, {**SCORES, "a": accuracy()})
    assert all((value == 0).all() for value in metric.compute().values())


def test_balanced_accuracy_excludes_classes_without_samples() -> None:
    truth, answers = torch.tensor([0, 0, 4, 4, 4]), torch.tensor([0, 1, 4, 4, 2])
    metric = MulticlassClassification(6, {"balanced": accuracy("macro"), "recall": recall("macro")})
    metric.update(torch.eye(6)[answers], truth)
    assert metric.compute()["balanced"].item() == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert metric.compute()["recall"].item() == pytest.approx((1 / 2 + 2 / 3) / 6)


def test_custom_score_is_computed_from_the_counts() -> None:
    def specificity(counts):  # noqa: ANN001, ANN202 - as a user would write it
        return counts.true_negative / (counts.true_negative + counts.false_positive)

    metric = BinaryClassification({"specificity": specificity})
    metric.update(torch.tensor([0.9, 0.1, 0.2, 0.3]), torch.tensor([0, 0, 0, 1]))
    assert metric.compute()["specificity"].tolist() == pytest.approx([2 / 3])
