"""Serve rollouts of a model in `transformers` to grpo.py: weights through shared memory, requests by HTTP.

    python examples/rollout_server.py --port 8765

    POST /model      config.json; builds the model, and returns the bytes of its weights
    POST /weights    file in shared memory, names, dtypes and shapes; copies the weights, and returns bytes and digest
    POST /generate   prompts of equal lengths; returns sampled tokens and their log-probabilities

The server serves one job on the same machine, listens only on 127.0.0.1, and reads no pickles.
"""

import argparse
import hashlib
import json
import math
import mmap
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class RequestError(ValueError):
    """Error of a request, which is sent to the client."""


class Rollouts:
    """The model, and the versions of its weights."""

    def __init__(self) -> None:
        self.model: Any = None
        self.versions: dict[str, int] = {}

    def open(self, config: dict[str, Any]) -> dict[str, Any]:
        """Build a model without weights; a new job replaces the model of the previous one."""
        from transformers import AutoConfig, AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
        self.versions = {}
        return {"bytes": sum(each.nbytes for each in self._parameters().values())}

    def load(self, sent: dict[str, Any]) -> dict[str, Any]:
        """Copy weights from shared memory into the model; return the number of bytes, and the digest of the copies."""
        parameters, digest, end = self._parameters(), hashlib.sha256(), 0
        with Path(sent["path"]).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
            for each in sent["tensors"]:
                parameter = self._checked(parameters, each, left=len(memory) - end)
                values = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=end)
                parameter.data.copy_(values.view_as(parameter))
                del values  # the file cannot be closed while a tensor uses it
                digest.update(parameter.detach().contiguous().view(torch.uint8).numpy())
                self.versions[each["name"]] = sent["version"]
                end += parameter.nbytes
        return {"bytes": end, "digest": digest.hexdigest()}

    @torch.no_grad()
    def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Sample `num_tokens` tokens at temperature 1, without stop tokens: the client truncates the answers."""
        missing = [name for name in self._parameters() if self.versions.get(name) != asked["version"]]
        if missing:
            raise RequestError(
                f"version {asked['version']} of the weights has no {missing[0]}; expected all parameters."
            )
        torch.manual_seed(asked["seed"])
        prompts = torch.tensor(asked["prompts"])
        found = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=asked["num_tokens"],
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        log_probs = torch.stack(found.logits, 1).float().log_softmax(-1)
        chosen = log_probs.gather(2, found.sequences[:, prompts.shape[1] :, None]).squeeze(2)
        return {"tokens": found.sequences.tolist(), "log_probs": chosen.tolist()}

    def _parameters(self) -> dict[str, nn.Parameter]:
        if self.model is None:
            raise RequestError("there is no model; expected a POST of its config.json to /model first.")
        return dict(self.model.named_parameters())  # tied weights once

    @staticmethod
    def _checked(parameters: dict[str, nn.Parameter], sent: dict[str, Any], *, left: int) -> Tensor:
        """Return the parameter to load; raise `RequestError` if dtype, shape or size do not match."""
        name, dtype, shape = sent["name"], sent["dtype"], sent["shape"]
        found = parameters.get(name)
        if found is None or [str(found.dtype), list(found.shape)] != [dtype, shape]:
            expected = "no such weight" if found is None else f"{found.dtype} {list(found.shape)}"
            raise RequestError(f"got {name} as {dtype} {shape}; expected {expected}.")
        if math.prod(shape) * found.element_size() > left:
            raise RequestError(f"the shared memory ends within {name}; expected all of its bytes.")
        return found


class Handler(BaseHTTPRequestHandler):
    """One request: a JSON object each way, or a line of text for an error."""

    rollouts = Rollouts()

    def do_POST(self) -> None:
        calls = {"/model": self.rollouts.open, "/weights": self.rollouts.load, "/generate": self.rollouts.generate}
        try:
            if self.path not in calls:
                raise RequestError(f"got {self.path}; expected one of {', '.join(calls)}.")
            value = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, text = 200, json.dumps(calls[self.path](value))
        except Exception as error:  # the client reports it
            status, text = 400, f"{type(error).__name__}: {error}"
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in http.server
        """Log nothing for each request."""


def serve(port: int) -> HTTPServer:
    """Return a server on 127.0.0.1; port 0 selects a free port. Call its `serve_forever`."""
    return HTTPServer(("127.0.0.1", port), type("OwnHandler", (Handler,), {"rollouts": Rollouts()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8765, help="port on 127.0.0.1; 0 selects a free port")
    parser.add_argument("--threads", type=int, default=1, help="number of threads of each operator")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    server = serve(options.port)
    print(f"serving rollouts on http://127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
