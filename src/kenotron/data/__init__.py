"""Token sources → order → micro-batches, with numpy and without torch.

stage_plan      stages and their sources, from the config alone
source          the interface of a source: SourceSpec (from the config), TokenSource (opened), Samples (read)
sources/        one file per kind: text, streams, tokenized files, random tokens, a user's own
order           computes which sample of which source comes next
open_stage      a stage ready to be read: open sources and their order
run             the batches of a run, and its held-out ones (held_out_batches)
provenance      which documents a step reads
formats/        tokenized files on disk; cache, manifest: tokenized text that is kept
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
