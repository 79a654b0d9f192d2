"""Commands that use the result of a run: `d9d-chat` talks to it, `d9d-eval` measures it."""

from d9d_loop.result.loaded_result import ByteTokenizer, LoadedResult, load_result

__all__ = ["ByteTokenizer", "LoadedResult", "load_result"]
