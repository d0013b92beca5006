"""Bugs of what surrounds a run: its ranks, their errors, and what it leaves in its process."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="the-kernels-of-a-run-stay-after-it",
        file="kernels/fused.py",
        find="        _chosen = before\n",
        replace="        pass\n",
        why="the next run of the process computes with the kernels that the one before asked for",
        tests=("kernels/test_products.py",),
    ),
    Mutant(
        name="a-backward-in-halves-stays-after-its-pipeline",
        file="kernels/products.py",
        find="        _whole = before\n",
        replace="        pass\n",
        why="the next run of the process multiplies by other kernels because one before it had a pipeline",
        tests=("kernels/test_products.py",),
    ),
    Mutant(
        name="an-error-of-another-rank-is-wrong-input",
        file="parallel/ranks.py",
        find="from kenotron.config.errors import FOR_USERS, PeerFailed\n",
        replace="from kenotron.config.errors import FOR_USERS, CheckpointError as PeerFailed\n",
        why="a bug on one rank is reported by the others as a mistake of the user, without a traceback, exit code 2",
        tests=("checkpoint/test_checkpoint_ranks.py",),
    ),
    Mutant(
        name="a-path-with-gloo-in-it-is-another-ranks-end",
        file="parallel/ranks.py",
        find="        of_gloo = type(found) is RuntimeError and re.search(",
        replace="        of_gloo = re.search(",
        why="a rank that cannot open such a file waits for another rank's error, and reports its own late",
        tests=("launch/test_failing_ranks.py",),
    ),
]
