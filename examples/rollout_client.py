"""Client of rollout_server.py in the trainer: sends weights through shared memory, and requests sampled answers."""

import hashlib
import json
import mmap
import tempfile
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from d9d_dist import UserError, agree, gather_json
from d9d_loop import Engine

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - on Linux; elsewhere the folder of temporary files
_SECONDS = 600.0  # timeout of a request


class RolloutClient:
    """Client of a rollout server on this machine. All methods, the constructor included, are collective.

    The first rank of each pipeline stage writes the weights of its stage into shared memory, posts their Hugging Face
    names, and compares the server's digest. HTTP carries no weights.

    Attributes:
        num_bytes: Number of bytes of all weights of the server's model; each `send_weights` moves exactly as many.

    Args:
        url: Address that the server printed.
        engine: Engine whose weights are sent.
        model: `config.json` of the model.

    Raises:
        UserError: On every rank, if there is no server.
    """

    def __init__(self, url: str, engine: Engine, model: Mapping[str, Any]) -> None:
        self._url, self._engine, self._version = url.rstrip("/"), engine, 0
        ctx = engine.ctx
        self._is_main = ctx.is_main_process
        self.num_bytes: int = self._together(lambda: self._ask("model", model) if self._is_main else None)["bytes"]
        total = sum(tensor.nbytes for _, tensor in engine.weights())
        self._is_sender = not any(ctx.coordinate("batch", axis) for axis in ("dp", "cp", "tp"))
        folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self._file = tempfile.NamedTemporaryFile(prefix="d9d-weights-", dir=folder)  # noqa: SIM115 - deleted with self
        if self._is_sender:
            self._file.truncate(total)
            self._memory = mmap.mmap(self._file.fileno(), total)

    def send_weights(self) -> int:
        """Send the weights as a new version, and verify them; return the number of bytes that all ranks moved.

        Raises:
            UserError: On every rank, if the server does not answer, or its weights differ from those of this job.
        """
        self._version += 1
        tensors, end = [], 0
        for name, tensor in self._engine.weights():
            if self._is_sender:
                place = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=end)
                place.copy_(tensor.flatten())
                tensors.append({"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)})
            end += tensor.nbytes
        arrived = self._together(lambda: self._post(tensors) if self._is_sender else None, every=True)
        moved = sum(each["bytes"] for each in arrived if each is not None)
        if moved != self.num_bytes:
            raise AssertionError(f"{moved} bytes were sent; the weights have {self.num_bytes}")
        return moved

    def sample(self, prompts: Tensor, *, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return prompts with sampled tokens [S, P + N], and the server's log-probabilities of these tokens [S, N].

        All ranks pass the same prompts [S, P], and get the same answers.

        Raises:
            UserError: On every rank, if the server does not answer, or does not have the last version of all weights.
        """
        request = {"version": self._version, "prompts": prompts.tolist(), "num_tokens": num_tokens, "seed": seed}
        found = self._together(lambda: self._ask("generate", request) if self._is_main else None)
        return torch.tensor(found["tokens"]), torch.tensor(found["log_probs"])

    def _post(self, tensors: list[dict[str, Any]]) -> dict[str, Any]:
        sent = {"version": self._version, "path": self._file.name, "tensors": tensors}
        arrived = self._ask("weights", sent)
        expected = hashlib.sha256(self._memory).hexdigest()
        if arrived["digest"] != expected or arrived["bytes"] != len(self._memory):
            raise UserError(
                f"the server at {self._url} holds {arrived['bytes']} bytes with digest {arrived['digest'][:12]} of the "
                f"weights of this stage; expected {len(self._memory)} bytes with digest {expected[:12]}. Restart the "
                "server; use one server for each job."
            )
        return arrived

    def _ask(self, path: str, value: Any) -> dict[str, Any]:
        address = urlsplit(self._url)
        try:
            connection = HTTPConnection(address.hostname or "", address.port, timeout=_SECONDS)
            connection.request("POST", f"/{path}", json.dumps(value))
            reply = connection.getresponse()
            text = reply.read().decode()
            found = json.loads(text) if reply.status == HTTPStatus.OK else {}
        except (OSError, HTTPException, ValueError) as error:
            raise UserError(
                f"no rollout server answers at {self._url}: {error}; expected one. Start it on this machine with "
                "`python examples/rollout_server.py`, and pass the address that it prints as --rollouts."
            ) from None
        if reply.status != HTTPStatus.OK:
            raise UserError(f"the rollout server refused /{path}: {text}")
        return found

    def _together(self, ask: Callable[[], dict[str, Any] | None], *, every: bool = False) -> Any:
        """Return the reply of rank 0, or with `every` of all ranks; raise a rank's error on all ranks. Collective."""
        reply, problem = None, None
        try:
            reply = ask()
        except UserError as error:
            problem = error
        agree(problem)
        replies = gather_json(reply)
        return replies if every else replies[0]
