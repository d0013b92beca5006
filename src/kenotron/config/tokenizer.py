"""`tokenizer`: a tokenizer from the hub or a folder, or one trained on the run's own data."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from kenotron.config.section import OURS, LocalPath, Section, key, problem


class TokenizerTraining(Section):
    """Train a byte-level BPE on the data of the first stage, once; it is cached and saved in checkpoints."""

    vocab_size: int = key(
        "Entries of the vocabulary, the 256 bytes and the end-of-text token included.", ge=257, mark=OURS
    )


class Tokenizer(Section):
    tokenizer_name_or_path: LocalPath | None = key(
        "Hub name, folder or tokenizer.json of the tokenizer; null where the data needs none.", None
    )
    tokenizer_revision: str | None = key("Revision of the hub name.", None)
    tokenizer_max_length: int | None = key(
        "Longest document in tokens; what is beyond is cut off before packing. null: no limit.", None, ge=1
    )
    train: TokenizerTraining | None = key(
        "Train a tokenizer on the data of the first stage instead of loading one.", None, mark=OURS
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.train and self.tokenizer_name_or_path:
            raise problem("train", "expected either tokenizer_name_or_path or train, found both")
        if self.tokenizer_revision and not self.tokenizer_name_or_path:
            raise problem("tokenizer_revision", "expected only beside tokenizer_name_or_path, which is null")
        return self
