"""Commands for the model of a finished run: `d9d-chat` chats with the model, `d9d-eval` evaluates it."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_loop.result.loaded_result import LoadedResult as LoadedResult
    from d9d_loop.result.loaded_result import load_result as load_result
else:
    __getattr__, __dir__ = lazy_exports(__name__)
