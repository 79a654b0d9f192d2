"""Training data: composable streams of samples in a global order that does not depend on the number of ranks."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_loop.data.best_fit import best_fit_decreasing
    from d9d_loop.data.bucketed_stream import BucketedStream
    from d9d_loop.data.chat_data import ChatData
    from d9d_loop.data.chat_files import tokenize_chats
    from d9d_loop.data.chat_stream import ChatStream
    from d9d_loop.data.chat_template import ChatTemplate, read_chat_template
    from d9d_loop.data.chat_tokenizer import ChatTokenizer, ChatTokens, read_chat_tokenizer
    from d9d_loop.data.conversation import Conversation, Message, TooLong, read_conversation, read_pair
    from d9d_loop.data.data_error import DataError
    from d9d_loop.data.data_provider import DataProvider, DatasetProvider
    from d9d_loop.data.document import Document, Pair
    from d9d_loop.data.document_stream import DocumentStream, TokenizedStream
    from d9d_loop.data.evaluation_pass import EvenlySpacedStream
    from d9d_loop.data.indexed_stream import IndexedStream
    from d9d_loop.data.iterated_stream import IteratedStream, StatefulIterable
    from d9d_loop.data.json_lines import JsonLines
    from d9d_loop.data.masked_text import Span, mark_spans
    from d9d_loop.data.mixture_stream import MixtureStream, Phase, SourceCount
    from d9d_loop.data.packed_stream import PackedStream, pack_row
    from d9d_loop.data.padding import PaddingCollate, pad_sequences
    from d9d_loop.data.pair_stream import PairStream
    from d9d_loop.data.prefetcher import Prefetcher
    from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream
    from d9d_loop.data.sharded_samples import ShardedSamples
    from d9d_loop.data.shuffled_stream import ShuffledStream
    from d9d_loop.data.stream_loader import Share, StreamLoader
    from d9d_loop.data.text_tokens import TextFiles, is_held_out, tokenize_text, train_tokenizer
    from d9d_loop.data.token_cache import cached_token_file
    from d9d_loop.data.token_file import TokenFile, TokenManifest
    from d9d_loop.data.token_file_writer import TokenFileWriter
    from d9d_loop.data.token_samples import PackedSamples, TokenWindows
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "BucketedStream",
    "ChatData",
    "ChatStream",
    "ChatTemplate",
    "ChatTokenizer",
    "ChatTokens",
    "Conversation",
    "Cursor",
    "DataError",
    "DataProvider",
    "DatasetProvider",
    "Document",
    "DocumentStream",
    "Entry",
    "EvenlySpacedStream",
    "IndexedStream",
    "IteratedStream",
    "JsonLines",
    "Message",
    "MixtureStream",
    "PackedSamples",
    "PackedStream",
    "PaddingCollate",
    "Pair",
    "PairStream",
    "Phase",
    "Prefetcher",
    "SampleStream",
    "ShardedSamples",
    "Share",
    "ShuffledStream",
    "SourceCount",
    "Span",
    "StatefulIterable",
    "StreamLoader",
    "TextFiles",
    "TokenFile",
    "TokenFileWriter",
    "TokenManifest",
    "TokenWindows",
    "TokenizedStream",
    "TooLong",
    "best_fit_decreasing",
    "cached_token_file",
    "is_held_out",
    "mark_spans",
    "pack_row",
    "pad_sequences",
    "read_chat_template",
    "read_chat_tokenizer",
    "read_conversation",
    "read_pair",
    "tokenize_chats",
    "tokenize_text",
    "train_tokenizer",
]
