"""Train a tokenizer, a byte-level BPE like GPT-2's."""

from collections.abc import Iterable, Iterator

from kenotron.config.errors import InputError
from kenotron.text.tokenizer import TextTokenizer, all_cores

END_OF_TEXT = "<|endoftext|>"

# The split of Llama 3 and cl100k: words include one leading space or mark (`_name`, `.name`), numbers are cut in
# threes, and blank lines with the indentation of the next line stay in one chunk, which matters for code.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def first_characters(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Yield the first of `texts`, until they have `characters` characters."""
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens, the first of which ends documents.

    Sennrich et al. 2016 (arXiv 1508.07909) on bytes as in GPT-2; no text is out of vocabulary.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise InputError(
            f"tokenizer.train.vocab_size: expected at least 257 (256 bytes and end of text), found {vocab_size}"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, level])  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with all_cores():
        backend.train_from_iterator(texts, trainer)
    config = {"eos_token": END_OF_TEXT, "clean_up_tokenization_spaces": False}
    return TextTokenizer(backend, config)
