"""Data of text-embedding jobs: groups of (query, document) pairs.

The other documents of a group are the negatives of a query. A group is one sample of the job, so its loss is the same
for any number of ranks and any microbatch size.

G: groups, K: pairs of a group, R: texts of a group, L: padded length.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, final

import torch
from pydantic import JsonValue
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.data import DatasetProvider
from d9d_loop.data.contents import contents_of, sampled_digest
from d9d_loop.data.sample_stream import Samples
from d9d_loop.data.text_tokenizer import TextTokenizer
from d9d_loop.jobs.job_config import EmbeddingConfig, TextJobConfig
from d9d_loop.jobs.text_data import dataset_of, fitted_ids, pad_groups, samples_of, text_tokenizer
from d9d_loop.jobs.text_model import padding_id


def text_groups(config: TextJobConfig, embedding: EmbeddingConfig) -> DatasetProvider:
    """Return groups of queries with their documents. A group of K pairs has K queries, K positives, then negatives."""
    tokenizer = text_tokenizer(config)
    training, evaluation = (
        None if samples is None else _Groups(samples, tokenizer, config, embedding)
        for samples in samples_of(config, partial(_texts, embedding=embedding))
    )
    assert training is not None
    return dataset_of(training, evaluation, config, collate=partial(_pad, padding=padding_id(config, tokenizer)))


def _pad(samples: list[tuple[list[Tensor], int]], *, padding: int) -> dict[str, Tensor]:
    """Pad all texts to the longest one: `input_ids` and `attention_mask` [G, R, L]. Add `num_pairs` [G]."""
    batch = pad_groups([[{"input_ids": text} for text in group] for group, _ in samples], padding=padding)
    return {**batch, "num_pairs": torch.tensor([num_pairs for _, num_pairs in samples])}


@final
class _Groups:
    """Groups of pairs. Group g of n has samples g, g + n, ..., because neighboring samples are often similar.

    A group is the list of its texts and the number of its pairs. If there are not enough pairs for all groups, some
    have fewer, followed by repeats of the last one.
    """

    def __init__(
        self, samples: Samples, tokenizer: TextTokenizer, config: TextJobConfig, embedding: EmbeddingConfig
    ) -> None:
        self._samples, self._tokenizer, self._data, self._embedding = samples, tokenizer, config.dataset, embedding
        self._count = -(-len(samples) // embedding.group)
        if len(samples) < embedding.group:
            raise UserError(
                f"embedding.group = {embedding.group}, but there are {len(samples)} samples for training or for "
                "evaluation; expected at least one whole group of each. Lower it, or change dataset.held_out."
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[list[Tensor], int]:
        texts = [_texts(self._samples[each], self._embedding) for each in range(index, len(self._samples), self._count)]
        num_pairs = len(texts)
        texts += [texts[-1]] * (self._embedding.group - num_pairs)
        columns = [each[0] for each in texts] + [each[1] for each in texts]
        columns += [negative for each in texts for negative in each[2:]]
        return [fitted_ids(self._tokenizer, text, self._data) for text in columns], num_pairs

    def contents_digest(self) -> JsonValue:
        """Return the tokenizer and the contents of the samples, and the digest of some groups."""
        return [self._tokenizer.identity(), contents_of(self._samples), sampled_digest(self)]


def _texts(sample: Mapping[str, Any], embedding: EmbeddingConfig) -> list[str]:
    """Return the query of a sample, its document and its negatives."""
    for field in (embedding.query_field, embedding.positive_field):
        if not isinstance(sample.get(field), str):
            raise UserError(
                f"a sample has no text {field!r}; it has {', '.join(sample)}. Set embedding.query_field and "
                "embedding.positive_field."
            )
    field, count = embedding.negatives_field, embedding.num_negatives
    found = sample.get(field) if count != 0 else None
    texts = [found] if isinstance(found, str) else found or []
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise UserError(
            f"a sample has {field} = {found!r:.60}; expected a text or a list of texts. Correct the sample."
        )
    found = f"a sample has {len(texts)} texts in {field!r}"
    if count is None and (texts or field != EmbeddingConfig.model_fields["negatives_field"].default):
        raise UserError(f"{found}, but embedding.num_negatives is not set; expected the number to use. 0 uses none.")
    if len(texts) < (count or 0):
        raise UserError(f"{found}; expected at least embedding.num_negatives = {count}. Add texts, or lower it.")
    return [sample[embedding.query_field], sample[embedding.positive_field], *texts[: count or 0]]
