"""Bugs of models that come in and go out: numbers that are plausible, and another model's."""

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
        file="checkpoint/text_files.py",
        find="        copyfile(source / GENERATION, folder / GENERATION)\n",
        replace="        pass\n",
        why="a chat model that was trained on does not stop at the end of its turn",
        tests=(f"{OTHERS}::test_a_run_that_starts_from_a_model_keeps_how_it_generates",),
    ),
    Mutant(
        name="ids-of-another-tokenizer",
        file="checkpoint/text_files.py",
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
        find="        raise untied_head(hf_weights.where, head, embedding)\n",
        replace="        pass\n",
        why="a head that differs from the embedding is dropped, and the logits are another model's",
        tests=("interop/test_conversion.py::test_a_head_beside_a_tied_config_must_equal_the_embedding",),
    ),
    Mutant(
        name="gate-and-up-of-nanotron-swapped",
        file="interop/from_nanotron.py",
        find='gate_proj": ("mlp.gate_up_proj", 0),\n        "mlp.up_proj": ("mlp.gate_up_proj", inner),\n',
        replace='gate_proj": ("mlp.gate_up_proj", inner),\n        "mlp.up_proj": ("mlp.gate_up_proj", 0),\n',
        why="shapes fit and the loss is that of a broken model: silu is applied to the wrong half",
        tests=("interop/test_from_nanotron.py::test_weights_moments_and_position_are_those_that_were_written",),
    ),
    Mutant(
        name="norms-of-queries-keep-the-order-of-pairs",
        file="interop/rope_layout.py",
        find='for module in ("proj.weight", "proj.bias", "norm.weight")',
        replace='for module in ("proj.weight", "proj.bias")',
        why="an export of a model with QK norms and interleaved RoPE scales the wrong channels",
        tests=(
            "models/test_families_equal_transformers.py::test_norms_and_channels_without_rope_follow_the_order_of_ropes_channels",
        ),
    ),
    Mutant(
        name="an-export-says-the-dtype-of-the-run",
        file="interop/exporting.py",
        find="    config = hf_config(architecture, dtype, ids",
        replace="    config = hf_config(architecture, source.model.dtype, ids",
        why="weights exported in float32 are loaded in bfloat16 by transformers, which reads it from config.json",
        tests=(
            "interop/test_conversion.py::test_fp32_masters_of_a_bf16_run_are_exported_in_bf16_unless_asked_otherwise",
        ),
    ),
    Mutant(
        name="the-last-of-several-ends-of-text",
        file="interop/hf_config.py",
        find="        eos = eos[0] if eos else None\n",
        replace="        eos = eos[-1] if eos else None\n",
        why="documents are ended by a token of the chat in place of the one that pretraining used",
        tests=("interop/test_hf_config.py::test_of_several_ends_of_text_the_first_is_taken_and_that_is_said",),
    ),
    Mutant(
        name="a-theta-that-a-file-leaves-out-is-llamas",
        file="interop/hf_config.py",
        find='getattr(config_class(family), "default_theta", 10000.0)',
        replace="10000.0",
        why="a model whose config.json relies on its family's default turns by other angles: it fails on long texts",
        tests=("interop/test_hf_config.py::test_a_file_without_theta_has_that_of_transformers",),
    ),
    Mutant(
        name="a-config-is-read-with-keys-of-the-overrides-lost",
        file="interop/hf_config.py",
        find="kind.section.model_validate(kind.from_hf(found, config) | overrides) if overrides else written",
        replace="kind.section.model_validate(overrides | kind.from_hf(found, config)) if overrides else written",
        why="a longer context that a config asks for beside hf: is not there, and nothing is said",
        tests=("interop/test_hf_config.py",),
    ),
]
