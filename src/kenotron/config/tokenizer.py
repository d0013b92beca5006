"""`tokenizer`: a tokenizer from the Hub or a folder, or one trained on the data of the run."""

from typing import Self

from pydantic import model_validator

from kenotron.config.section import LocalPath, Section, key, our_key, problem


class TokenizerTraining(Section):
    """Train a byte-level BPE on the data of the first stage. It is cached, and saved in checkpoints."""

    vocab_size: int = our_key("Vocabulary size, including the 256 bytes and the end-of-text token.", ge=257)


class Tokenizer(Section):
    """The tokenizer of the run."""

    tokenizer_name_or_path: LocalPath | None = key(
        "Hub name, folder, or tokenizer.json file; null if the data needs no tokenizer.", None
    )
    tokenizer_revision: str | None = key("Revision of the Hub repository.", None)
    tokenizer_max_length: int | None = key(
        "Maximum document length in tokens; longer documents are truncated before packing. null: no limit.", None, ge=1
    )
    train: TokenizerTraining | None = our_key(
        "Train a tokenizer on the data of the first stage instead of loading one.", None
    )

    @model_validator(mode="after")
    def _check_origin(self) -> Self:
        if self.train and self.tokenizer_name_or_path:
            raise problem("train", "expected either tokenizer_name_or_path or train, found both")
        if self.tokenizer_revision and not self.tokenizer_name_or_path:
            raise problem("tokenizer_revision", "expected null without tokenizer_name_or_path")
        return self
