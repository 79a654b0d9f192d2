"""Numbers of the classes of a classification job: those of a folder that is a classifier, or those of the data."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from d9d_dist import UserError
from d9d_dist.errors import shorten
from d9d_loop.jobs.job_config import TextJobConfig
from d9d_loop.model.hugging_face_model import read_config

_INTEGER = re.compile(r"-?\d+")


@final
@dataclass(frozen=True, slots=True)
class Classes:
    """Classes of a job.

    Attributes:
        names: Name of each class, by number.
        numbers: Number of the class of each label in the data.
        is_kept: True if `names` are those of the folder, so that its configuration is kept.
    """

    names: list[str]
    numbers: Mapping[str, int]
    is_kept: bool

    @classmethod
    def of(cls, config: TextJobConfig, labels: Collection[str]) -> Self:
        """Number the labels as the job's model does; those of a new head are sorted.

        Sorted labels are integers by value, then texts alphabetically.

        Raises:
            UserError: If the model does not have a class for each label, or there are fewer than two labels.
        """
        known, wanted = _known_names(config), config.model.entries.get("num_labels")
        if known is not None:
            return cls(known, _numbers(known, labels), is_kept="id2label" not in config.model.entries)
        if len(labels) < 2:
            raise UserError(
                f"dataset.label_field = {config.dataset.label_field}: found {len(labels)} class; expected at least 2. "
                "Check the field."
            )
        if wanted not in (None, len(labels)):
            raise UserError(
                f"model.num_labels = {wanted}, but dataset.files has {len(labels)} labels: {shorten(labels)}; "
                "expected equal numbers. Set model.id2label for classes without samples."
            )
        names = sorted(labels, key=lambda label: (0, int(label), label) if _INTEGER.fullmatch(label) else (1, 0, label))
        return cls(names, {name: number for number, name in enumerate(names)}, is_kept=False)

    def entries(self) -> dict[str, Any]:
        """Return the entries of `config.json` that name the classes; none if those of the folder are kept."""
        if self.is_kept:
            return {}
        names = dict(enumerate(self.names))
        label2id = {name: number for number, name in names.items()}
        return {"num_labels": len(names), "id2label": names, "label2id": label2id}

    def number(self, label: str) -> int:
        """Return the number of a label's class; raise `UserError` if no training sample has the label."""
        if label not in self.numbers:
            raise UserError(
                f"the label {label!r} is not among the training labels; expected one of those classes. Add samples "
                "of it to dataset.files, or remove it from the evaluation."
            )
        return self.numbers[label]


def _known_names(config: TextJobConfig) -> list[str] | None:
    """Return the names of the classes that the model has: of `model.id2label`, or of a folder that is a classifier."""
    from transformers import AutoModelForSequenceClassification as Auto
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    entries, folder = config.model.entries, config.model.folder
    given = entries.get("id2label")
    if given is None:
        if folder is None:
            return None
        found = read_config(folder, Auto, {})
        if not set(found.architectures or ()) & set(CLASSIFIERS.values()):
            return None
        if entries.get("num_labels", found.num_labels) != found.num_labels:
            return None  # the configuration asks for a new head
        _check_kind(found.problem_type, folder)
        given = found.id2label
    if not isinstance(given, Mapping) or not all(_INTEGER.fullmatch(str(number)) for number in given):
        raise UserError(f"model.id2label = {given!r:.60}; expected a table such as {{0 = 'no', 1 = 'yes'}}.")
    numbered = {int(number): str(name) for number, name in given.items()}
    if sorted(numbered) != list(range(len(numbered))):
        raise UserError(f"id2label has the numbers {shorten(numbered)}; expected 0 to {len(numbered) - 1}.")
    return [numbered[number] for number in range(len(numbered))]


def _check_kind(problem_type: str | None, folder: object) -> None:
    if problem_type not in (None, "single_label_classification"):
        raise UserError(
            f"{folder} has problem_type = {problem_type}, but job = classify trains one class per text; expected "
            "single_label_classification. Choose another folder, or set model.problem_type and model.num_labels for a "
            "new head."
        )


def _numbers(names: list[str], labels: Iterable[str]) -> dict[str, int]:
    """Number labels that are all names of the model's classes, or all numbers of them."""
    labels = list(labels)
    by_name = {name: number for number, name in enumerate(names)}
    if all(label in by_name for label in labels):
        return {label: by_name[label] for label in labels}
    by_number = {str(number): number for number in range(len(names))}
    if all(label in by_number for label in labels):
        return {label: by_number[label] for label in labels}
    unknown = sorted(label for label in labels if label not in by_name)
    raise UserError(
        f"the model has the classes {shorten(names)}, but dataset.files has the labels {shorten(unknown)}; "
        f"expected those names, or their numbers 0 to {len(names) - 1}. Correct the labels, name the classes in "
        "model.id2label, or set model.num_labels to another number of classes for a new head."
    )
