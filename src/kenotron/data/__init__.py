"""Token sources → order → micro-batches. numpy; no torch."""

from .batch import NO_LOSS, TokenBatch, TokenSource
from .order import Order
from .run import RunData, open_run
from .tokenizer import Tokenizer, load_tokenizer
from .validation import compression_baselines

__all__ = [
    "NO_LOSS",
    "Order",
    "RunData",
    "TokenBatch",
    "TokenSource",
    "Tokenizer",
    "compression_baselines",
    "load_tokenizer",
    "open_run",
]
