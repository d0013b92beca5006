"""Token sources → order → micro-batches. numpy; no torch.

stage_plan      stages and their sources, from the config alone
source          the interface of a source: SourceSpec (from the config), TokenSource (open), Samples (read)
sources/        one file a kind: text, streams, tokenized files, random tokens, a user's own
order           which sample of which source comes next: arithmetic
open_stage      a stage ready to be read: open sources and their order
run             the batches of a run, and its held-out ones (held_out_batches)
provenance      which documents a step reads
formats/        tokenized files on disk; cache, manifest: what is kept of text
"""

from kenotron.data.batch import NO_LOSS, TokenBatch
from kenotron.data.order import Order
from kenotron.data.run import RunData, open_run
from kenotron.data.source import Samples, SourceSpec, TokenSource
from kenotron.text.tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "NO_LOSS",
    "Order",
    "RunData",
    "Samples",
    "SourceSpec",
    "TextTokenizer",
    "TokenBatch",
    "TokenSource",
    "load_tokenizer",
    "open_run",
]
