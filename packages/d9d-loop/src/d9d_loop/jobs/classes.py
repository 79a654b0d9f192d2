"""Numbers of the classes of a classification job: those of a folder that is a classifier, or those of the data."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from d9d_dist import UserError
from d9d_dist.errors import shorten
from d9d_loop.jobs.job_config import TextJobConfig
from d9d_loop.model.hugging_face_model import read_config

_INTEGER = re.compile(r"-?\d+")
_KIND = "single_label_classification"


@final
@dataclass(frozen=True, slots=True)
class Classes:
    """Classes of a job.

    Attributes:
        numbers: Number of the class of each label.
        entries: Entries of `config.json` that name the classes; none if those of the folder are kept.
    """

    numbers: Mapping[str, int]
    entries: Mapping[str, Any]

    @classmethod
    def of(cls, config: TextJobConfig, labels: Collection[str]) -> Self:
        """Number the labels as the job's model does; those of a new head are sorted.

        Raises:
            UserError: If the model does not have a class for each label, there are fewer than two labels, or an entry
                of the model asks for another problem or for other numbers.
        """
        known, given = _known_names(config), config.model.entries
        id2label = dict(enumerate(_sorted_names(config, labels) if known is None else known))
        label2id = {name: number for number, name in id2label.items()}
        entries = {"num_labels": len(id2label), "id2label": id2label, "label2id": label2id, "problem_type": _KIND}
        for name in ("num_labels", "label2id"):
            if (got := given.get(name, entries[name])) != (expected := entries[name]):
                raise UserError(f"model.{name} = {got}; expected {expected} by the classes. Set only model.id2label.")
        is_kept = known is not None and not given.keys() & {"id2label", "problem_type"}
        return cls(_numbers([*id2label.values()], labels), {} if is_kept else entries)

    def number(self, label: str) -> int:
        """Return the number of a label's class; raise `UserError` if there is no such class."""
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
    _check_kind(entries.get("problem_type"), "[model]")
    given = entries.get("id2label")
    if given is None:
        if folder is None:
            return None
        found = read_config(folder, Auto, {})
        if not set(found.architectures or ()) & set(CLASSIFIERS.values()):
            return None
        if entries.get("num_labels", found.num_labels) != found.num_labels:
            return None  # the configuration asks for a new head
        _check_kind(entries.get("problem_type", found.problem_type), folder)
        given = found.id2label
    if not isinstance(given, Mapping) or not all(_INTEGER.fullmatch(str(number)) for number in given):
        raise UserError(f"model.id2label = {given!r:.60}; expected a table such as {{0 = 'no', 1 = 'yes'}}.")
    numbered = {int(number): str(name) for number, name in given.items()}
    if sorted(numbered) != list(range(len(numbered))):
        raise UserError(f"id2label has the numbers {shorten(numbered)}; expected 0 to {len(numbered) - 1}.")
    return [numbered[number] for number in range(len(numbered))]


def _check_kind(problem_type: str | None, where: object) -> None:
    if problem_type not in (None, _KIND):
        raise UserError(
            f"{where} has problem_type = {problem_type}, but job = classify trains one class per text; expected "
            f"{_KIND}. Choose another folder, or set model.problem_type to it."
        )


def _sorted_names(config: TextJobConfig, labels: Collection[str]) -> list[str]:
    """Return the classes of a new head: sorted labels, integers by value, then texts alphabetically."""
    if len(labels) < 2:
        raise UserError(
            f"dataset.label_field = {config.dataset.label_field}: found {len(labels)} class; expected at least 2. "
            "Check the field."
        )
    if (wanted := config.model.entries.get("num_labels")) not in (None, len(labels)):
        raise UserError(
            f"model.num_labels = {wanted}, but dataset.files has {len(labels)} labels: {shorten(labels)}; "
            "expected equal numbers. Set model.id2label for classes without samples."
        )
    return sorted(labels, key=lambda label: (0, int(label), label) if _INTEGER.fullmatch(label) else (1, 0, label))


def _numbers(names: list[str], labels: Collection[str]) -> dict[str, int]:
    """Return the names of the model's classes with their numbers, or the numbers if the labels are these."""
    by_name = {name: number for number, name in enumerate(names)}
    if by_name.keys() >= set(labels):
        return by_name
    by_number = {str(number): number for number in range(len(names))}
    if by_number.keys() >= set(labels):
        return by_number
    unknown = sorted(set(labels) - by_name.keys())
    raise UserError(
        f"the model has the classes {shorten(names)}, but dataset.files has the labels {shorten(unknown)}; "
        f"expected those names, or their numbers 0 to {len(names) - 1}. Correct the labels, name the classes in "
        "model.id2label, or set model.num_labels to another number of classes for a new head."
    )
