"""Tokenizing without workers, each of which is an interpreter that starts; `real_workers` is for tests of them."""

from collections.abc import Iterator
from typing import Any

import pytest

from kenotron.prepare import tokenize
from kenotron.text import encode


def encoded_here(batches: Any, tokenizer_json: str, rules: encode.EncodeRules, processes: int) -> Iterator[Any]:
    """What `encode_batches` yields, made in this process."""
    answer = encode._answerer(tokenizer_json, rules)
    for batch in batches:
        yield batch, answer(*encode._texts(batch))


@pytest.fixture
def real_workers() -> None:
    """The test starts processes as the command does."""


@pytest.fixture(autouse=True)
def _no_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_workers" not in request.fixturenames:
        monkeypatch.setattr(tokenize, "encode_batches", encoded_here)
