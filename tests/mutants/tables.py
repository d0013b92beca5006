"""All mutants, package by package."""

from __future__ import annotations

from mutants import checkpoint, data, generation, interop, launch, models, optim, parallel, training
from mutants.mutant import Mutant, NotCounted

TABLES = (models, optim, parallel, data, checkpoint, interop, generation, training, launch)

MUTANTS: list[Mutant] = [mutant for table in TABLES for mutant in table.MUTANTS]
NOT_COUNTED: list[NotCounted] = [entry for table in TABLES for entry in getattr(table, "NOT_COUNTED", [])]
