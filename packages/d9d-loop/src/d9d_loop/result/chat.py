"""Command that chats with the model of a finished run: d9d-chat RUN_OR_FOLDER."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d9d_dist import UserError
from d9d_loop import result as results
from d9d_loop.cli_main import cli_main
from d9d_loop.result.adapted_base import add_base_options

if TYPE_CHECKING:
    import torch

    from d9d_loop.result import LoadedResult

_SAMPLING = {"temperature": 0.7, "top_p": 0.95, "top_k": 0}
"""Settings where `generation_config.json` has none, if it has no `do_sample` either."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer each line of standard input; the text is streamed to standard output.

    With a chat template each line is a turn of one conversation; otherwise each line is continued on its own.

    Raises:
        UserError: If the folder or an option is invalid.
    """
    parser = argparse.ArgumentParser(
        prog="d9d-chat",
        description="Chat with the model of a finished run. With a chat template, each line is a turn of one "
        "conversation; /new starts a new one. Without a template, each line is a prompt to continue. /quit or end of "
        "file exits.",
    )
    parser.add_argument("path", help="folder of a run, of adapters, or of a model in Hugging Face layout")
    add_base_options(parser)
    parser.add_argument("--prompt", help="answer this prompt and exit, instead of reading standard input")
    parser.add_argument("--system", help="system message of the conversation")
    parser.add_argument("--image", action="append", type=Path, default=[], help="images of the first message, one each")
    parser.add_argument("--plain", action="store_true", help="continue the text even if there is a chat template")
    parser.add_argument(
        "--max-new-tokens", type=int, default=512, help="maximum length of an answer; default: %(default)s"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="sampling temperature, 0 for greedy decoding; default: as generation_config.json says, else 0.7",
    )
    parser.add_argument(
        "--top-p", type=float, help="nucleus sampling; default: as generation_config.json says, else 0.95"
    )
    parser.add_argument("--seed", type=int, help="sampling seed; random by default")
    parser.add_argument("--device", help="device of the model; default: the accelerator, if there is one, else the CPU")
    options = parser.parse_args(arguments)
    _check(options)
    if options.seed is not None:
        import torch  # noqa: PLC0415 - help is printed without torch

        torch.manual_seed(options.seed)
    result = results.load_result(
        options.path, device=choose_device(options.device), base=options.base, weights=options.base_weights
    )
    if result.adapted is not None:
        print(f"d9d: {result.adapted}.", file=sys.stderr)
    _check_fit(result, options)
    opening = [] if options.system is None else [{"role": "system", "content": options.system}]
    turns = list(opening)
    if options.prompt is not None:
        _answer(result, turns, options.prompt, options)
        return
    if sys.stdin.isatty():
        kind = "continues each line" if result.chat is None or options.plain else "answers; /new starts again"
        print(f"{result.folder} {kind}. /quit ends.", file=sys.stderr)
    while line := _next_line():
        line = line.strip()
        if line == "/quit":
            return
        if line == "/new":
            turns = list(opening)
        elif line:
            _answer(result, turns, line, options)


def answer_tokens(
    result: "LoadedResult",
    input_ids: Sequence[int],
    *,
    max_new_tokens: int,
    on_tokens: Callable[[list[int]], object],
    temperature: float | None = None,
    top_p: float | None = None,
    images: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of one continuation up to a stop token, by `generate` of `transformers`.

    The settings of the model's `generation_config.json` apply, except `num_beams` and `num_return_sequences`. If it has
    no `do_sample`, tokens are sampled, with a temperature of 0.7 and `top_p` of 0.95 where it has none. `temperature`
    and `top_p` replace these; a temperature of 0 selects greedy decoding. `on_tokens` is called with all tokens so far
    after each new one. `images` are the inputs of the model beside `input_ids`, such as pixels.
    """
    import torch  # noqa: PLC0415 - help is printed without torch

    device, stops = result.model.device, list(result.stop_tokens)
    ids = torch.tensor([list(input_ids)], device=device)
    inputs = {"attention_mask": torch.ones_like(ids), **(images or {})}
    own, streamed = result.model.generation_config, _Streamed(stops, on_tokens)
    ends: list[str] = own.stop_strings or []
    ends = [ends] if isinstance(ends, str) else ends

    def has_ended(tokens: "torch.Tensor", _scores: object, **_: object) -> "torch.Tensor":
        text = result.tokenizer.decode(tokens[0, ids.shape[1] :].tolist()) if ends else ""
        return torch.full((1,), any(end in text for end in ends), device=device)

    result.model.generate(
        input_ids=ids,
        **{name: value.to(device) for name, value in inputs.items()},
        max_new_tokens=max_new_tokens,
        eos_token_id=stops or None,
        pad_token_id=stops[0] if stops else 0,
        streamer=streamed,
        stop_strings=None,
        stopping_criteria=[has_ended],
        num_beams=1,
        num_return_sequences=1,
        **_sampling(own, temperature, top_p),
    )
    return streamed.tokens


def _sampling(own: Any, temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """Return the arguments of `generate` that choose tokens, if `own` are the model's settings."""
    options = {name: getattr(own, name) for name in ("do_sample", *_SAMPLING)}
    if own.do_sample is None:
        missing = {name: value for name, value in _SAMPLING.items() if options[name] is None}
        options |= {"do_sample": True, **missing}
    given = {"temperature": temperature, "top_p": top_p}
    if given := {name: value for name, value in given.items() if value is not None}:
        options |= {"do_sample": True, **given}
    if not options["do_sample"] or options["temperature"] == 0:
        options = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}  # defaults, without an effect
    return {name: value for name, value in options.items() if value is not None}


class _Streamed:
    """Streamer of `generate`: passes on all tokens so far, without the stop token at the end."""

    def __init__(self, stops: Sequence[int], on_tokens: Callable[[list[int]], object]) -> None:
        self.tokens: list[int] = []
        self._stops, self._on_tokens, self._is_prompt = stops, on_tokens, True

    def put(self, value: "torch.Tensor") -> None:
        """Add generated tokens, several with prompt lookup. The first call passes the prompt, which is ignored."""
        tokens: list[int] = [] if self._is_prompt else value.flatten().tolist()
        for token in takewhile(lambda each: each not in self._stops, tokens):
            self.tokens.append(token)
            self._on_tokens(self.tokens)
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: all tokens have been passed on."""


def choose_device(name: str | None) -> "torch.device":
    """Return a device by name; `None` selects the accelerator, or the CPU without one."""
    import torch  # noqa: PLC0415 - help is printed without torch

    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else accelerator
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} is not usable: {str(error).splitlines()[0]} Use another device.") from error


def _next_line() -> str:
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline()


def _answer(result: "LoadedResult", turns: list[dict[str, Any]], line: str, options: argparse.Namespace) -> None:
    """Stream the answer to a line, and add both to the turns."""
    is_chat = result.chat is not None and not options.plain
    inputs: dict[str, Any] = {}
    if is_chat:
        assert result.chat is not None
        is_first = all(turn["role"] == "system" for turn in turns)
        images = [{"type": "image"} for _ in options.image] if is_first else []
        turns.append({"role": "user", "content": [*images, {"type": "text", "text": line}] if images else line})
        text = result.chat.render(turns, add_generation_prompt=True)
        ids = result.tokenizer.encode_offsets(text).ids
        if options.image:
            from d9d_loop.data.image_chat import decode_image  # noqa: PLC0415 - an extra

            pixels = [decode_image(str(path), Path()) for path in options.image]
            inputs = dict(result.processor(text=[text], images=[pixels], add_special_tokens=False, return_tensors="pt"))
            ids = inputs.pop("input_ids")[0].tolist()
    else:
        ids = result.tokenizer.encode_prompt(line)
        print(line, end="", flush=True)
    if not ids:
        raise UserError(f"the prompt {line!r} has no tokens; expected at least one.")
    room = options.max_new_tokens if result.max_context is None else result.max_context - len(ids)
    if room < 1:
        raise UserError(
            f"the conversation has {len(ids)} tokens; the model supports {result.max_context}, including the answer. "
            "Start a new conversation (/new), or shorten the prompt."
        )
    shown = ""

    def show(tokens: list[int]) -> None:
        nonlocal shown
        text = result.tokenizer.decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # otherwise the character continues in the next token
            print(text[len(shown) :], end="", flush=True)
            shown = text

    answer_tokens(
        result,
        ids,
        max_new_tokens=min(options.max_new_tokens, room),
        on_tokens=show,
        temperature=options.temperature,
        top_p=options.top_p,
        images=inputs,
    )
    print(flush=True)
    if is_chat:
        turns.append({"role": "assistant", "content": shown})


def _check_fit(result: "LoadedResult", options: argparse.Namespace) -> None:
    """Raise `UserError` if an option needs a chat template or an image processor that the model lacks."""
    if options.system is not None and (result.chat is None or options.plain):
        raise UserError(
            f"--system needs a chat template, but the tokenizer of {result.folder} has none, or --plain disables it. "
            "Remove --system."
        )
    if options.image and (result.processor is None or result.chat is None or options.plain):
        raise UserError(
            f"--image needs a vision-language model with its processor and a chat template, and {result.folder} is "
            "none, or --plain disables the template. Remove --image, or choose another model."
        )


def _check(options: argparse.Namespace) -> None:
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {options.max_new_tokens}; expected at least 1.")
    if options.temperature is not None and options.temperature < 0:
        raise UserError(f"--temperature {options.temperature}; expected 0 (greedy decoding) or more.")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p}; expected above 0 and at most 1.")
    if missing := [path for path in options.image if not path.is_file()]:
        raise UserError(f"--image {missing[0]}: there is no such file; expected an image. Correct the path.")


run = cli_main()(main)
"""Entry point of `d9d-chat`."""


if __name__ == "__main__":
    run()
