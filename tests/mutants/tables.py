"""All mutants, package by package."""

from mutants import (
    checkpoint,
    cli,
    config,
    data,
    doctor,
    evaluation,
    generation,
    interop,
    kernels,
    launch,
    models,
    observers,
    optim,
    parallel,
    planner,
    prepare,
    storage,
    text,
    training,
)
from mutants.mutant import Mutant, NotCounted

TABLES = (
    kernels,
    models,
    optim,
    parallel,
    config,
    text,
    prepare,
    data,
    storage,
    checkpoint,
    interop,
    generation,
    training,
    observers,
    planner,
    launch,
    cli,
    evaluation,
    doctor,
)

MUTANTS: list[Mutant] = [mutant for table in TABLES for mutant in table.MUTANTS]
NOT_COUNTED: list[NotCounted] = [entry for table in TABLES for entry in getattr(table, "NOT_COUNTED", [])]
