"""Bugs of models that come in and go out: numbers that are plausible, and another model's."""

from __future__ import annotations

from mutants.mutant import Mutant

FROM_NANOTRON = ("interop/test_from_nanotron.py::test_weights_moments_and_position_are_those_that_were_written",)

EXPORT = ("layouts/test_export_on_layouts.py::test_every_layout_exports_the_whole_model",)

OTHERS = "interop/test_exports_for_others.py"

MUTANTS = [
    Mutant(
        name="null-flags-mean-our-default",
        file="interop/hf_config.py",
        find="**dict.fromkeys(nulls, False)",
        replace="",
        why="experts' weights are normalized where transformers takes null as false; refused since the values differ",
        tests=("interop/test_hf_reading.py::test_nulls_and_keys_of_others_mean_what_they_mean_to_transformers",),
    ),
    Mutant(
        name="keys-that-only-transformers-reads-are-ignored",
        file="interop/hf_reading.py",
        find="        if found != computed:\n",
        replace="        if False:\n",
        why="a file whose layers attend in both directions is trained as a causal model",
        tests=("interop/test_hf_reading.py::test_a_key_that_transformers_reads_and_we_do_not_is_refused",),
    ),
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
    Mutant(
        name="only-the-newest-spelling-of-rotary-positions",
        file="interop/older_readers.py",
        find="found = dict(written) | _rope(written)",
        replace="found = dict(written)",
        why="readers of rope_theta and rope_scaling take 10000 and none: another model, and nobody says so",
        tests=(f"{OTHERS}::test_an_export_has_the_keys_that_transformers_4_wrote",),
    ),
    Mutant(
        name="experts-under-the-newest-name-alone",
        file="interop/older_readers.py",
        find='        found["num_experts"] = written[its_name]\n',
        replace="        pass\n",
        why="readers of num_experts take the default of 128 experts",
        tests=(f"{OTHERS}::test_an_export_has_the_keys_that_transformers_4_wrote",),
    ),
    Mutant(
        name="training-loses-the-ends-of-text",
        file="checkpoint/model_files.py",
        find="        copyfile(source / GENERATION, folder / GENERATION)\n",
        replace="        pass\n",
        why="a chat model that was trained on does not stop at the end of its turn",
        tests=(f"{OTHERS}::test_a_run_that_starts_from_a_model_keeps_how_it_generates",),
    ),
    Mutant(
        name="ids-of-another-tokenizer",
        file="checkpoint/model_files.py",
        find="if tokenizer is None or _hash(source) == tokenizer.hash:",
        replace="if True:",
        why="the export stops at ids that mean other text",
        tests=(f"{OTHERS}::test_a_run_with_another_tokenizer_does_not_take_over_ids_of_the_first",),
    ),
    Mutant(
        name="a-start-of-text-that-no-tokenizer-has",
        file="interop/exporting.py",
        find="        bos = tokenizer.bos_token_id\n",
        replace="        pass\n",
        why="texts begin with an ordinary token in every program that puts bos_token_id before them",
        tests=(f"{OTHERS}::test_config_and_generation_config_name_no_token_that_the_tokenizer_lacks",),
    ),
    Mutant(
        name="a-tied-head-is-not-compared",
        file="interop/tensor_names.py",
        find="        _check_tied(theirs, family.hf_name(HEAD), family.hf_name(EMBEDDING))\n",
        replace="        pass\n",
        why="a head that differs from the embedding is dropped, and the logits are another model's",
        tests=("interop/test_duplicate_weights.py::test_a_head_beside_a_tied_config_must_equal_the_embedding",),
    ),
]
