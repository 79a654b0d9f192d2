"""Commands that use the result of a run: `d9d-chat` talks to it, `d9d-eval` measures it."""

from d9d_loop.data.byte_tokenizer import ByteTokenizer as ByteTokenizer
from d9d_loop.result.loaded_result import LoadedResult as LoadedResult
from d9d_loop.result.loaded_result import load_result as load_result
