"""Samples of text that a language model generates at each evaluation, for the trackers and the report."""

from typing import Any, final

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.event_bus import on_event
from d9d_loop.events import EvaluationDone, ModelReady
from d9d_loop.jobs.job_config import CHAT_JOBS, TextJobConfig
from d9d_loop.jobs.text_data import chat_tokenizer, text_tokenizer
from d9d_loop.jobs.text_export import end_ids
from d9d_metrics import Text

_NUM_TOKENS = 64


@final
class TextSamples:
    """Event handler that continues the `prompts` of a job, or answers them in a chat, by greedy decoding of 64 tokens.

    At each evaluation, all ranks run the same forward passes, without a key/value cache. The text ends with the first
    stop token; see `end_ids`. If `dataset.length` is reached, decoding stops early.

    Raises:
        UserError: If a prompt has no token, or is not shorter than `dataset.length`.
    """

    def __init__(self, config: TextJobConfig) -> None:
        self._tokenizer, self._length = text_tokenizer(config), config.dataset.length
        self._is_packed = config.has_own_model
        self._texts, self._ids = dict[str, str](), dict[str, list[int]]()
        chats = chat_tokenizer(config) if config.job in CHAT_JOBS else None
        self._stops = set(end_ids(config))
        for prompt in config.prompts:
            if chats is None:
                self._texts[prompt], self._ids[prompt] = prompt, self._tokenizer.encode_prompt(prompt)
            else:
                self._texts[prompt], self._ids[prompt] = chats.prompt(prompt)
        for prompt, ids in self._ids.items():
            if not 0 < len(ids) < self._length:
                raise UserError(
                    f"prompts: {prompt!r:.60} has {len(ids)} tokens; expected at least 1, and fewer than "
                    f"dataset.length = {self._length}. Shorten it."
                )

    @on_event(ModelReady)
    def keep_context(self, ready: ModelReady) -> None:
        """Keep the distributed context of the job."""
        self._ctx = ready.ctx

    @on_event(EvaluationDone)
    def write(self, done: EvaluationDone) -> None:
        """Track a text for each prompt. Collective."""
        answers = [self._continue(self._ids[prompt], done) for prompt in self._texts]
        texts = [
            text + self._tokenizer.decode(answer, skip_special_tokens=False)
            for text, answer in zip(self._texts.values(), answers, strict=True)
        ]
        done.track({f"sample_{number}": Text(text) for number, text in enumerate(texts)})

    def _continue(self, ids: list[int], done: EvaluationDone) -> list[int]:
        """Return the new tokens. Later positions of the row [1, L] do not affect earlier ones."""
        stop, multiple = min(len(ids) + _NUM_TOKENS, self._length), self._ctx.size("batch", "tp")
        row = torch.zeros(1, -(-stop // multiple) * multiple, dtype=torch.int64, device=self._ctx.device)
        row[0, : len(ids)] = torch.tensor(ids)
        for position in range(len(ids), stop):
            # Logits [1, L, V], or the outputs of a `transformers` model, whose stages take arguments by name.
            outputs: Any = done.forward(row) if self._is_packed else done.forward(input_ids=row)
            logits = outputs if isinstance(outputs, Tensor) else outputs.logits
            row[0, position] = logits[0, position - 1].argmax()
        answer = row[0, len(ids) : stop].tolist()
        # All ranks decode all tokens, so that a different rounding on one rank cannot change the number of collectives.
        end = next((number for number, token in enumerate(answer) if token in self._stops), len(answer))
        return answer[: end + 1]
