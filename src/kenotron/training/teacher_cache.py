"""A cache file of a teacher's most probable tokens: the teacher reads each sample once, and other runs read the cache.

    record of sample i, at i * bytes:    ids [length, k] | log-probabilities [length, k + 1], fp16 | hash of its tokens

The last log-probability is for all other tokens together, so that each row is a distribution over k + 1 outcomes.
Samples have the same numbers on every layout and in every run with the same data, seed and batch; the hash detects
other samples. It comes last: a record that was truncated by a full disk has no hash, and is written again. Ranks write
disjoint records.
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
    """`ids` ``[tokens, k]``; log-probabilities `logs` ``[tokens, k + 1]`` in fp16, the last for all other tokens."""

    ids: Tensor
    logs: Tensor


def top_k_of(logits: Tensor, k: int) -> TopK:
    """Return the `k` most probable tokens by logits ``[tokens, vocab]`` in fp32."""
    ids = logits.topk(k).indices
    return TopK(ids, _grouped(logits, ids).half())


def distance(logits: Tensor, teacher: TopK) -> Tensor:
    """Return the Kullback-Leibler divergence ``[tokens]`` of the model's logits ``[tokens, vocab]`` from `teacher`."""
    expected = teacher.logs.float().log_softmax(-1)  # normalized again, because of fp16's rounding
    return F.kl_div(_grouped(logits, teacher.ids), expected, reduction="none", log_target=True).sum(-1)


def _grouped(logits: Tensor, ids: Tensor) -> Tensor:
    logs = logits.log_softmax(-1)
    others = logs.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((logs.gather(-1, ids), others), -1)


class TeacherCache:
    """The file in `folder`, for samples of `length` tokens, with `k` of the `vocab_size` tokens at each position.

    `facts` are the other settings that the answers depend on. Raises InputError if the folder was made with other
    settings, or cannot be written.
    """

    def __init__(self, folder: Path, k: int, length: int, vocab_size: int, facts: dict[str, object]) -> None:
        facts |= {"top_k": k, "sequence_length": length, "vocab_size": vocab_size}
        settings, file = folder / "top_k.json", folder / "top_k.bin"
        with os_errors(f"{AT}: cannot use {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            if not settings.exists():
                replace_file(settings, json.dumps(facts, indent=2).encode())
            for name, value in read_json(settings).items():
                if value != facts.get(name):
                    raise InputError(f"{AT}: {folder} was made with {name} {value}; expected {facts.get(name)}")
            self._file = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        self._ids = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._shapes = (length, k), (length, k + 1)
        self._ids_end = length * k * self._ids.itemsize
        self._bytes = self._ids_end + 2 * length * (k + 1) + HASH_BYTES
        self.samples = os.fstat(self._file).st_size // self._bytes  # at the start of the run

    def read(self, micro_batch: MicroBatch) -> TopK | None:
        """Return the answers for the samples, or None if one is missing. Raises InputError if their tokens differ."""
        ids, logs = [], []
        for number, hashed in _samples(micro_batch):
            record = os.pread(self._file, self._bytes, number * self._bytes)
            if len(record) < self._bytes or not any(record[-HASH_BYTES:]):
                return None
            if record[-HASH_BYTES:] != hashed:
                raise InputError(
                    f"{AT}: sample {number} has other tokens in the cache; expected a separate folder for other data, "
                    "another seed, sequence_length or global batch"
                )
            ids.append(np.frombuffer(record[: self._ids_end], self._ids).reshape(self._shapes[0]))
            logs.append(np.frombuffer(record[self._ids_end : -HASH_BYTES], np.float16).reshape(self._shapes[1]))
        device = micro_batch.tokens.device
        numbers = torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(device)
        return TopK(numbers, torch.from_numpy(np.concatenate(logs)).to(device))

    def write(self, micro_batch: MicroBatch, top_k: TopK) -> None:
        """Store the answers for the samples. Raises InputError if the disk is full."""
        samples = _samples(micro_batch)
        ids, logs = top_k.ids.cpu().numpy().astype(self._ids), top_k.logs.cpu().numpy()
        rows = zip(samples, np.split(ids, len(samples)), np.split(logs, len(samples)), strict=True)
        with os_errors(f"{AT}: cannot write"):
            for (number, hashed), sample_ids, sample_logs in rows:
                os.pwrite(self._file, sample_ids.tobytes() + sample_logs.tobytes() + hashed, number * self._bytes)


def _samples(micro_batch: MicroBatch) -> list[tuple[int, bytes]]:
    """Return the number of each sample, and the hash of its tokens."""
    numbers = micro_batch.ctx.sample_ids
    assert numbers is not None, "data give every sample a number"
    tokens = micro_batch.tokens.view(micro_batch.ctx.shape).cpu().numpy()
    hashes = [hashlib.blake2b(row.tobytes(), digest_size=HASH_BYTES).digest() for row in tokens]
    return list(zip(numbers.tolist(), hashes, strict=True))
