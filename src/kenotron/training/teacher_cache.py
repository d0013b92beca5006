"""A teacher's most probable tokens, kept in a file: it reads each sample once, and other runs look its answers up.

    record of sample i, at i * bytes:    ids [length, k] | log-probabilities [length, k + 1], fp16 | hash of its tokens

The last log-probability is that of all other tokens together, so that each row is a distribution, and the distance from
it that of two distributions over k + 1 outcomes. Samples have the same numbers on every layout and in every run with
the same data, seed and batch; the hash tells others. It comes last: a record that a full disk has cut has none, and is
written again. Ranks write records of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.config.errors import InputError, os_errors
from kenotron.models import MicroBatch
from kenotron.storage.files import replace_file
from kenotron.storage.hub import read_json

AT = "model.loss.cache"
HASH_BYTES = 8


class TopK(NamedTuple):
    """`ids` ``[tokens, k]``; `logs` ``[tokens, k + 1]`` fp16: log-probabilities, the last of all others together."""

    ids: Tensor
    logs: Tensor


def top_k_of(logits: Tensor, k: int) -> TopK:
    """The `k` most probable tokens by logits ``[tokens, vocab]`` in fp32."""
    ids = logits.topk(k).indices
    return TopK(ids, _grouped(logits, ids).half())


def distance(logits: Tensor, theirs: TopK) -> Tensor:
    """The Kullback-Leibler divergence of the model's logits ``[tokens, vocab]`` from `theirs`, for every token."""
    expected = theirs.logs.float().log_softmax(-1)  # without what rounding has added
    return F.kl_div(_grouped(logits, theirs.ids), expected, reduction="none", log_target=True).sum(-1)


def _grouped(logits: Tensor, ids: Tensor) -> Tensor:
    logs = logits.log_softmax(-1)
    others = logs.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((logs.gather(-1, ids), others), -1)


class TeacherCache:
    """The file in `folder`, for samples of `length` tokens, `k` of the `vocab_size` entries of each.

    `facts` are what the answers depend on besides. Raises InputError: the folder is of others, or cannot be written.
    """

    def __init__(self, folder: Path, k: int, length: int, vocab_size: int, facts: dict[str, object]) -> None:
        facts |= {"top_k": k, "sequence_length": length, "vocab_size": vocab_size}
        said, file = folder / "top_k.json", folder / "top_k.bin"
        with os_errors(f"{AT}: cannot use {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            if not said.exists():
                replace_file(said, json.dumps(facts, indent=2).encode())
            for name, there in read_json(said).items():
                if there != facts.get(name):
                    raise InputError(f"{AT}: {folder} was made with {name} {there}; expected {facts.get(name)}")
            self.begun = file.exists()
            self._file = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        self._ids = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._shapes = (length, k), (length, k + 1)
        self._ids_end = length * k * self._ids.itemsize
        self._bytes = self._ids_end + 2 * length * (k + 1) + HASH_BYTES

    def read(self, micro_batch: MicroBatch) -> TopK | None:
        """What is known of the samples; None if one is missing. Raises InputError where they are others."""
        ids, logs = [], []
        for number, hashed in _samples(micro_batch):
            record = os.pread(self._file, self._bytes, number * self._bytes)
            if len(record) < self._bytes or not any(record[-HASH_BYTES:]):
                return None
            if record[-HASH_BYTES:] != hashed:
                raise InputError(
                    f"{AT}: sample {number} there is of other tokens; expected a folder of its own for other data, "
                    "another seed, sequence_length or global batch"
                )
            ids.append(np.frombuffer(record[: self._ids_end], self._ids).reshape(self._shapes[0]))
            logs.append(np.frombuffer(record[self._ids_end : -HASH_BYTES], np.float16).reshape(self._shapes[1]))
        device = micro_batch.tokens.device
        numbers = torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(device)
        return TopK(numbers, torch.from_numpy(np.concatenate(logs)).to(device))

    def write(self, micro_batch: MicroBatch, found: TopK) -> None:
        """Keep what was found of the samples. Raises InputError: the disk is full."""
        samples = [*_samples(micro_batch)]
        ids, logs = found.ids.cpu().numpy().astype(self._ids), found.logs.cpu().numpy()
        rows = zip(samples, np.split(ids, len(samples)), np.split(logs, len(samples)), strict=True)
        with os_errors(f"{AT}: cannot write"):
            for (number, hashed), of_ids, of_logs in rows:
                os.pwrite(self._file, of_ids.tobytes() + of_logs.tobytes() + hashed, number * self._bytes)


def _samples(micro_batch: MicroBatch) -> list[tuple[int, bytes]]:
    """The number of each sample, and the hash of its tokens."""
    numbers = micro_batch.ctx.sample_ids
    assert numbers is not None, "data give every sample a number"
    tokens = micro_batch.tokens.view(micro_batch.ctx.shape).cpu().numpy()
    hashes = [hashlib.blake2b(row.tobytes(), digest_size=HASH_BYTES).digest() for row in tokens]
    return list(zip(numbers.tolist(), hashes, strict=True))
