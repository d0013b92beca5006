"""`data_stages`: the data of the run, and the step at which each stage of them starts.

A dataset is one of these variants, recognized by the first key shown:

    null                                                     synthetic random tokens
    {hf_dataset_or_datasets: org/name, …}                    Hugging Face `datasets`, packed for pretraining
    {hf_dataset_or_datasets: …, sft_dataloader: true}        prompts and answers of such datasets, for fine-tuning
    {text_files: chats.jsonl, sft_dataloader: true}          the same from files                  (Kénotron)
    {dataset_folder: [a, b], dataset_weights: [1, 2], …}     folders of .ds files (Nanoset)
    {tokens: {code: 3, prose.bin: 1}}                        tokenized files of any format            (Kénotron)
    {corpus: python-stdlib}                                  the embedded corpus                      (Kénotron)
    {text_files: texts/}                                     txt, jsonl files and folders, packed or not (Kénotron)
    {source: package.module.make, kwargs: {}}                a token source of your own               (Kénotron)
    {mixture: [{weight: 3, corpus: python-stdlib}, …]}       several of the above                     (Kénotron)
"""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, Tag, model_validator

from kenotron.config.section import NO_EFFECT, LocalPath, Section, by_rule, has_key, key, null_means, our_key, problem


def _by_kind(value: Any) -> str | None:
    kinds: dict[type, str] = {str: "(one)", list: "(list)", dict: "(weighted)"}
    return kinds.get(type(value))


Share = Annotated[float, Field(gt=0)]
Names = Annotated[
    Annotated[LocalPath, Tag("(one)")]
    | Annotated[list[LocalPath], Field(min_length=1), Tag("(list)")]
    | Annotated[dict[LocalPath, float], Field(min_length=1), Tag("(weighted)")],
    by_rule(_by_kind, "a name, a list of names, or a map name → number"),
]
PathsOrShares = Annotated[
    Annotated[LocalPath, Tag("(one)")]
    | Annotated[list[LocalPath], Field(min_length=1), Tag("(list)")]
    | Annotated[dict[LocalPath, Share], Field(min_length=1), Tag("(weighted)")],
    by_rule(_by_kind, "a path, a list of paths, or a map path → share"),
]
NameOrNames = Annotated[
    Annotated[LocalPath, Tag("(one)")] | Annotated[list[LocalPath], Field(min_length=1), Tag("(list)")],
    by_rule(lambda v: _by_kind(v) if not isinstance(v, dict) else None, "a name or a list of names"),
]


def _by_measure(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return "(measure)" if isinstance(value, str) else "(number)"


Weight = Annotated[
    Annotated[Share, Tag("(number)")] | Annotated[Literal["tokens", "size"], Tag("(measure)")],
    by_rule(_by_measure, "a number above 0, tokens or size"),
]


class Dataset(Section):
    """The keys that all variants share."""

    weight: Weight | None = our_key(
        "Share in a mixture: a number, or in proportion to its training tokens (tokens) or bytes (size).", None
    )
    max_epochs: float | None = our_key(
        "Maximum number of epochs over all stages, for each of its paths; null: no limit.", None, gt=0
    )


Packing = Literal["windows", "best_fit"]
_PACKING = "windows: tokens end to end, cut every sequence_length; best_fit: whole documents, none cut that fits."


class _PackedDataset(Dataset):
    packing: Packing = our_key(_PACKING, "windows")


class Streaming(Section):
    """Text that is tokenized while the run reads it: nothing is cached, memory is bounded."""

    shuffle_buffer: int = our_key("Size of the shuffle buffer, in documents; 1: file order.", 10_000, ge=1)
    reader_shards: int = our_key(
        "Number of files read at a time, a document of each in turn; at most the number of files.", 1, ge=1
    )


class _Streamed(Section):
    streaming: Streaming | None = our_key(
        "Tokenize during training, and save the position in checkpoints; null: tokenize once and cache the tokens.",
        None,
    )

    @model_validator(mode="after")
    def _check_streaming(self) -> Self:
        for name in ("packing", "max_epochs", "dataset_processing_num_proc_per_process", "dataset_overwrite_cache"):
            field = type(self).model_fields.get(name)
            if self.streaming is not None and field is not None and (found := getattr(self, name)) != field.default:
                raise problem(
                    name, f"not supported with streaming (no cache, no length, windows only); remove it, found {found}"
                )
        return self


class _PlainText(_Streamed):
    on_bad_document: Literal["error", "skip"] = our_key(
        "A text that cannot be read (null, damaged) ends the run, or is left out and counted.", "error"
    )


class _HFDataset(_PackedDataset):
    hf_dataset_or_datasets: Names = key("Hub name or folder, a list of them, or a map name → fraction of its rows.")
    hf_dataset_splits: Annotated[NameOrNames, null_means("train")] = key("Split, or splits, to read.", "train")
    hf_dataset_config_name: str | None = key("Configuration of the dataset.", None)
    dataset_processing_num_proc_per_process: int = key("Tokenizing processes.", 1, ge=1)
    dataset_overwrite_cache: bool = key("Tokenize again even if the result is cached.", False)


class PretrainDataset(_HFDataset, _PlainText):
    """Hugging Face datasets, their text column packed into sequences."""

    text_column_name: Annotated[str, null_means("text")] = key("Column that contains the text.", "text")


class _Examples(_PackedDataset):
    """Prompts and answers: only answers carry a loss, and documents are masked from each other."""

    sft_dataloader: Literal[True] = key("Selects supervised fine-tuning.", True)
    debug_max_samples: int | None = key("Cap on the rows; null: all.", None, ge=1)
    prompt_column_name: str = our_key("Column of the prompt.", "prompt")
    completion_column_name: str = our_key("Column of the answer, which carries the loss.", "completion")
    messages_column_name: str = our_key(
        "Column of a conversation, a list of {role, content}; rows with it need no prompt.", "messages"
    )
    packing: Packing = our_key(_PACKING, "best_fit")


class SFTDataset(_Examples, _HFDataset):
    """Hugging Face datasets of prompts and answers."""


class NanosetDataset(_PackedDataset):
    """Folders of tokens in `.ds` files, as datatrove and `kenotron data tokenize` write them (Nanoset)."""

    dataset_folder: NameOrNames = key("Folder, or folders, of `.ds` files, including nested folders.")
    dataset_weights: list[Share] | None = key("Share of each folder; null: in proportion to its samples.", None)
    dataset_read_path: NameOrNames | None = key(
        "Folder, or folders, of local copies: a file that has a copy is read from it.", None
    )
    tokenizer_name: str | None = key(
        "Tokenizer of the files, compared with that of the run; null: from their metadata.", None
    )
    vocab_size: int | None = key(
        "Vocabulary size: ids must be below it; null: model.model_config.vocab_size.", None, ge=1
    )
    token_size_in_bytes: Literal[2, 4] | None = key("Bytes per token; null: as the files declare.", None)
    return_positions: bool = key(
        "Read document boundaries, for model.document_masking; false: every sequence counts as one document.", True
    )
    skip_in_stream: bool = key(
        "Skip by reading on resume; not needed, samples are found by index.", False, mark=NO_EFFECT
    )
    pad_samples_to_global_batch_size: bool = key(
        "Pad the last batch; not needed, every batch is full.", False, mark=NO_EFFECT
    )
    dataset_max_tokens: list[Annotated[int, Field(ge=1)]] | None = key(
        "Cap on the training tokens of each folder; null: all.", None
    )
    shuffle_files: bool = key(
        "Shuffle the files of each folder by general.seed before the cap; samples are always shuffled.", False
    )
    use_old_brrr_dataloader: bool = key("Has no effect in nanotron either.", False, mark=NO_EFFECT)

    @property
    def folders(self) -> list[str]:
        """The folders, as a list."""
        return as_list(self.dataset_folder)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        folders = len(self.folders)
        for name in ("dataset_weights", "dataset_read_path", "dataset_max_tokens"):
            values = getattr(self, name)
            if values is not None and len(as_list(values)) != folders:
                raise problem(name, f"expected one entry per folder ({folders}), found {len(as_list(values))}")
        if self.packing == "best_fit" and not self.return_positions:
            raise problem("return_positions", "expected true with packing: best_fit, which needs document boundaries")
        return self


def as_list(names: str | list[str]) -> list[str]:
    """Return one name or several as a list."""
    return [names] if isinstance(names, str) else names


TokenType = Literal["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]


class TokenFilesDataset(_PackedDataset):
    """Tokenized files of any format that is read here: datatrove, Megatron, litdata, numpy."""

    tokens: PathsOrShares = our_key(
        "File or folder, a list (in proportion to their samples), a map path → share, or a .json file with such a map."
    )
    token_dtype: TokenType | None = our_key("Dtype of the ids in files that do not declare it (raw .bin).", None)


class EmbeddedCorpus(_PackedDataset, _Streamed):
    """Real text that every machine has: the source files of Python's standard library."""

    corpus: Literal["python-stdlib"] = our_key("Name of the embedded corpus.")


class TextFiles(_PackedDataset, _PlainText):
    """Text files."""

    text_files: PathsOrShares = our_key(
        "Files (txt, JSONL, both also .gz or .zst, parquet, arrow) or folders, a list, or a map path → share."
    )
    text_column_name: Annotated[str, null_means("text")] = our_key(
        "Field of a JSON line that contains the text.", "text"
    )


class SFTFiles(_Examples):
    """Files of prompts and answers."""

    text_files: NameOrNames = our_key("Files (JSONL, also .gz or .zst, parquet, arrow) or folders of them.")


class CustomSource(Dataset):
    """Your own token source."""

    source: str = our_key(
        "Dotted path of a class or function that returns a token source, or its name as an entry point of "
        "kenotron.datasets."
    )
    kwargs: dict[str, Any] = our_key("Keyword arguments for it.", {})


_Plain = (
    Annotated[PretrainDataset, Tag("(pretrain)")]
    | Annotated[SFTDataset, Tag("(sft)")]
    | Annotated[NanosetDataset, Tag("(nanoset)")]
    | Annotated[TokenFilesDataset, Tag("(tokens)")]
    | Annotated[EmbeddedCorpus, Tag("(corpus)")]
    | Annotated[TextFiles, Tag("(text)")]
    | Annotated[SFTFiles, Tag("(sft files)")]
    | Annotated[CustomSource, Tag("(source)")]
)
_TAGS: dict[type[Dataset], str] = {variant: tag.tag for variant, tag in map(get_args, get_args(_Plain))}
_DECIDING = {
    "dataset_folder": "(nanoset)",
    "tokens": "(tokens)",
    "corpus": "(corpus)",
    "text_files": "(text)",
    "source": "(source)",
}


def _choose_plain(value: Any) -> str | None:
    if not isinstance(value, dict):
        return _TAGS.get(type(value))
    is_sft = has_key(value, "sft_dataloader") or has_key(value, "debug_max_samples")
    if has_key(value, "hf_dataset_or_datasets"):
        return "(sft)" if is_sft else "(pretrain)"
    if has_key(value, "text_files") and is_sft:
        return "(sft files)"
    return next((tag for name, tag in _DECIDING.items() if name in value), None)


def _choose(value: Any) -> str | None:
    if isinstance(value, MixtureDataset) or (isinstance(value, dict) and "mixture" in value):
        return "(mixture)"
    return _choose_plain(value)


_KEYS = ["hf_dataset_or_datasets", *_DECIDING]
_EXPECTED = "a dataset: null, or a map with one of the keys "
PlainDataset = Annotated[_Plain, by_rule(_choose_plain, _EXPECTED + ", ".join(_KEYS), _KEYS)]


class MixtureDataset(Section):
    """A mixture of datasets; in every prefix of the run, each has its exact share to within two samples."""

    mixture: list[PlainDataset] = our_key("Datasets, each with its weight.", min_length=1)

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        for i, dataset in enumerate(self.mixture):
            if dataset.weight is None:
                raise problem(f"mixture.{i}.weight", "missing: every dataset of a mixture needs a weight")
        kinds = {dataset.weight if isinstance(dataset.weight, str) else "numbers" for dataset in self.mixture}
        if len(kinds) > 1:
            raise problem("mixture", f"expected weights of one kind, found {' and '.join(sorted(kinds))}")
        return self


AnyDataset = Annotated[
    _Plain | Annotated[MixtureDataset, Tag("(mixture)")],
    by_rule(_choose, _EXPECTED + ", ".join((*_KEYS, "mixture")), (*_KEYS, "mixture")),
]


# TEXT_DATASETS are tokenized by this run, TOKEN_DATASETS were tokenized before.
SFT_DATASETS = (SFTDataset, SFTFiles)
TEXT_DATASETS = (PretrainDataset, EmbeddedCorpus, TextFiles, *SFT_DATASETS)
TOKEN_DATASETS = (NanosetDataset, TokenFilesDataset)
# Keys that say how much of a dataset is trained on, and in which order.
ONLY_TRAINING = ("weight", "max_epochs", "streaming", "dataset_weights", "dataset_max_tokens", "shuffle_files")


def paths_of(dataset: PlainDataset | None) -> list[str]:
    """Return the local or remote paths of a plain dataset, or no paths if it reads no files."""
    if isinstance(dataset, NanosetDataset):
        return dataset.folders
    if not isinstance(dataset, TokenFilesDataset | TextFiles | SFTFiles):
        return []
    paths = dataset.tokens if isinstance(dataset, TokenFilesDataset) else dataset.text_files
    return [paths] if isinstance(paths, str) else list(paths)


def _most_sources(dataset: PlainDataset | None) -> int:
    """Return the largest number of sources with shares in a plain dataset; 2 stands for any number, in a mix file."""
    is_map = isinstance(dataset, TextFiles) and isinstance(dataset.text_files, dict)
    if is_map or isinstance(dataset, NanosetDataset | TokenFilesDataset):
        paths = paths_of(dataset)
        return 2 if paths[0].endswith(".json") else len(paths)
    return 1


class Data(Section):
    """What a stage reads, and how its sources are mixed."""

    dataset: AnyDataset | None = key("The data; null: synthetic random tokens.")
    seed: Annotated[int, null_means(42)] = key("Seed of the data order.", 42, ge=0)
    num_loading_workers: int = key(
        "Prefetching threads: the maximum over stages, and one if a stage is a stream; 0: read in the training thread.",
        1,
        ge=0,
    )
    temperature: float = our_key(
        "Shares are proportional to weight^(1 / temperature): above 1 they become more equal.", 1.0, gt=0
    )
    when_exhausted: Literal["stop", "renormalise", "repeat"] = our_key(
        "What happens when a source reaches its max_epochs: the run ends, the other sources continue, or the source is "
        "repeated.",
        "stop",
    )
    restart: bool = our_key(
        "Read every source from its beginning, even if an earlier stage has read part of it.", False
    )

    @property
    def datasets(self) -> list[PlainDataset | None]:
        """The datasets of the mixture, or the only dataset."""
        return [*self.dataset.mixture] if isinstance(self.dataset, MixtureDataset) else [self.dataset]

    @model_validator(mode="after")
    def _check_effects(self) -> Self:
        if isinstance(self.dataset, Dataset) and self.dataset.weight is not None:
            raise problem("dataset.weight", "expected only inside a mixture")
        limited = any(dataset is not None and dataset.max_epochs is not None for dataset in self.datasets)
        if self.when_exhausted != "stop" and not limited:
            raise problem("when_exhausted", "expected max_epochs to be set in a dataset")
        if sum(map(_most_sources, self.datasets)) == 1:
            if self.when_exhausted == "renormalise":
                raise problem("when_exhausted", "expected stop or repeat: there is no other source")
            if self.temperature != 1:
                raise problem("temperature", f"expected 1 with a single source, found {self.temperature:g}")
        return self


class BatchSizeRamp(Section):
    """A batch that grows by `increment` samples after every equal share of `samples`, up to the global batch size."""

    start: int = our_key("Samples of the first step of the stage.", ge=1)
    increment: int = our_key("Samples added to a step at each increase.", ge=1)
    samples: int = our_key("Number of samples after which the batch has its full size.", ge=1)


class DataStage(Section):
    """A phase of the run: its data from one step on."""

    name: str = key("Name of the stage.")
    start_training_step: int = key("First step of the stage; the first stage starts at 1.", ge=1)
    data: Data = key("The data of the stage.")
    sequence_length: int | None = key("Sequence length of the stage; null: tokens.sequence_length.", None, ge=1)
    batch_size_ramp: BatchSizeRamp | None = our_key("Smaller batches at the beginning of the stage; null: none.", None)
