"""Bugs of models that come in and go out: numbers that are plausible, and another model's."""

from __future__ import annotations

from mutants.mutant import Mutant

FROM_NANOTRON = ("interop/test_from_nanotron.py::test_weights_moments_and_position_are_those_that_were_written",)

EXPORT = ("layouts/test_export_on_layouts.py::test_every_layout_exports_the_whole_model",)

MUTANTS = [
    Mutant(
        name="masters-of-nanotron-dropped",
        file="interop/from_nanotron.py",
        find="optimizer.tensor(weight, MASTER) if MASTER in keys else weight",
        replace="weight",
        why="a run goes on from weights rounded to bfloat16, as nanotron's own when it resumes with another tp or pp",
        tests=FROM_NANOTRON,
    ),
    Mutant(
        name="zero-shares-in-another-order",
        file="interop/nanotron_files.py",
        find='for dp in range(self.sizes["dp"])]',
        replace='for dp in reversed(range(self.sizes["dp"]))]',
        why="moments of the right size belong to other weights",
        tests=FROM_NANOTRON,
    ),
    Mutant(
        name="only-rank-0-exports-its-shards",
        file="interop/exporting.py",
        find="for file in list(plan.files)[rank::ranks]:",
        replace="for file in list(plan.files)[rank::ranks] if rank == 0 else []:",
        why="the export of a run on several ranks lacks most of its files, and its index names them",
        tests=EXPORT,
    ),
    Mutant(
        name="an-export-without-its-code",
        file="interop/exporting.py",
        find="    copy_code(family_of(architecture), folder)\n",
        replace="",
        why="config.json names files that nobody wrote: the export of a nano cannot be loaded",
        tests=("interop/test_hf_code.py",),
    ),
]
