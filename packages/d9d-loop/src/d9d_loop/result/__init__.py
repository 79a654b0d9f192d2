"""Commands for the model of a finished run: `d9d-chat` chats with the model, `d9d-eval` evaluates it."""

from d9d_loop.result.loaded_result import LoadedResult as LoadedResult
from d9d_loop.result.loaded_result import load_result as load_result
