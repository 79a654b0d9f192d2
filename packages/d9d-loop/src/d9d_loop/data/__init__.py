"""Training data: composable streams of samples in a global order that does not depend on the number of ranks."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_loop.data.chat_data import ChatData as ChatData
    from d9d_loop.data.chat_stream import ChatStream as ChatStream
    from d9d_loop.data.chat_stream import PairStream as PairStream
    from d9d_loop.data.chat_stream import tokenize_chats as tokenize_chats
    from d9d_loop.data.chat_template import ChatTemplate as ChatTemplate
    from d9d_loop.data.chat_template import read_chat_template as read_chat_template
    from d9d_loop.data.chat_tokenizer import ChatTokenizer as ChatTokenizer
    from d9d_loop.data.chat_tokenizer import ChatTokens as ChatTokens
    from d9d_loop.data.chat_tokenizer import Span as Span
    from d9d_loop.data.chat_tokenizer import mark_spans as mark_spans
    from d9d_loop.data.chat_tokenizer import read_chat_tokenizer as read_chat_tokenizer
    from d9d_loop.data.conversation import Conversation as Conversation
    from d9d_loop.data.conversation import Message as Message
    from d9d_loop.data.conversation import TooLong as TooLong
    from d9d_loop.data.conversation import read_conversation as read_conversation
    from d9d_loop.data.conversation import read_pair as read_pair
    from d9d_loop.data.data_provider import DataProvider as DataProvider
    from d9d_loop.data.data_provider import DatasetProvider as DatasetProvider
    from d9d_loop.data.document import Document as Document
    from d9d_loop.data.document import Pair as Pair
    from d9d_loop.data.document_stream import DocumentStream as DocumentStream
    from d9d_loop.data.document_stream import TokenizedStream as TokenizedStream
    from d9d_loop.data.indexed_stream import IndexedStream as IndexedStream
    from d9d_loop.data.iterated_stream import IteratedStream as IteratedStream
    from d9d_loop.data.iterated_stream import StatefulIterable as StatefulIterable
    from d9d_loop.data.json_lines import JsonLines as JsonLines
    from d9d_loop.data.json_lines import JsonObject as JsonObject
    from d9d_loop.data.mixture_stream import MixtureStream as MixtureStream
    from d9d_loop.data.mixture_stream import Phase as Phase
    from d9d_loop.data.mixture_stream import SourceCount as SourceCount
    from d9d_loop.data.packed_stream import PackedStream as PackedStream
    from d9d_loop.data.packed_stream import TokenWindows as TokenWindows
    from d9d_loop.data.packed_stream import best_fit_decreasing as best_fit_decreasing
    from d9d_loop.data.packed_stream import pack_row as pack_row
    from d9d_loop.data.padding import PaddingCollate as PaddingCollate
    from d9d_loop.data.prefetcher import Prefetcher as Prefetcher
    from d9d_loop.data.sample_files import open_samples as open_samples
    from d9d_loop.data.sample_order import SampleOrder as SampleOrder
    from d9d_loop.data.sample_stream import Collate as Collate
    from d9d_loop.data.sample_stream import Cursor as Cursor
    from d9d_loop.data.sample_stream import Entry as Entry
    from d9d_loop.data.sample_stream import Samples as Samples
    from d9d_loop.data.sample_stream import SampleStream as SampleStream
    from d9d_loop.data.shuffled_stream import BucketedStream as BucketedStream
    from d9d_loop.data.shuffled_stream import ShuffledStream as ShuffledStream
    from d9d_loop.data.stream_loader import Share as Share
    from d9d_loop.data.stream_loader import StreamLoader as StreamLoader
    from d9d_loop.data.text_tokenizer import TextTokenizer as TextTokenizer
    from d9d_loop.data.text_tokenizer import read_text_tokenizer as read_text_tokenizer
    from d9d_loop.data.text_tokens import TextFiles as TextFiles
    from d9d_loop.data.text_tokens import is_held_out as is_held_out
    from d9d_loop.data.text_tokens import tokenize_text as tokenize_text
    from d9d_loop.data.text_tokens import train_tokenizer as train_tokenizer
    from d9d_loop.data.token_file import TokenFile as TokenFile
    from d9d_loop.data.token_file import TokenManifest as TokenManifest
    from d9d_loop.data.token_file_writer import TokenFileWriter as TokenFileWriter
    from d9d_loop.data.token_file_writer import cached_token_file as cached_token_file
    from d9d_loop.data.token_formats import open_tokens as open_tokens
    from d9d_loop.data.token_formats import write_tokens as write_tokens
    from d9d_loop.data_error import DataError as DataError
else:
    __getattr__, __dir__ = lazy_exports(__name__)
