"""The kinds of token sources, one file each, registered by their section of the config.

A kind is a function ``specs(section) → [(share, SourceSpec), …]``, registered here by its dotted path, and imported
when a config uses it, in the same way as a user's own `dataset.source`. So training depends only on the interface
(`data/source.py`), and imports no kinds that it does not use.
"""

from collections.abc import Callable

from kenotron.config.data_stages import (
    CustomSource,
    EmbeddedCorpus,
    NanosetDataset,
    PlainDataset,
    PretrainDataset,
    SFTDataset,
    SFTFiles,
    TextFiles,
    TokenFilesDataset,
)
from kenotron.config.dotted import import_registered
from kenotron.data.source import SourceSpec

DATASETS = "kenotron.datasets"
"""The group of entry points under which packages register datasets."""

Specs = list[tuple[float | str, SourceSpec]]
"""The sources of one dataset, each with its share: a number, or the measure that shares are computed by."""

KINDS: dict[type, str] = {
    type(None): "kenotron.data.sources.random_tokens.specs",
    EmbeddedCorpus: "kenotron.data.sources.text.specs",
    TextFiles: "kenotron.data.sources.text.specs",
    PretrainDataset: "kenotron.data.sources.text.specs",
    SFTDataset: "kenotron.data.sources.text.specs",
    SFTFiles: "kenotron.data.sources.text.specs",
    NanosetDataset: "kenotron.data.sources.token_files.nanoset_specs",
    TokenFilesDataset: "kenotron.data.sources.token_files.specs",
    CustomSource: "kenotron.data.sources.user.specs",
}


def specs_of(section: PlainDataset | None) -> Specs:
    """Return the sources of a dataset of the config. Raises InputError if a mix file cannot be read."""
    specs: Callable[[PlainDataset | None], Specs] = import_registered(KINDS[type(section)], "dataset", DATASETS)
    return specs(section)
