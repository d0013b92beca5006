"""Bugs of reading a config: another value than the file and the command line say, or a run taken for another."""

from mutants.mutant import Mutant

RUNS = "config/test_config_runs.py"

MUTANTS = [
    Mutant(
        name="an-override-is-split-at-its-last-equals-sign",
        file="config/overrides.py",
        find='    path, equals, value = text.partition("=")\n',
        replace='    path, equals, value = text.rpartition("=")\n',
        why="a value with an equals sign in it, such as a prompt or the query of a URL, is taken for a part of the key",
        tests=("config/test_config_errors.py::test_values_are_yaml",),
    ),
    Mutant(
        name="merged-keys-win-over-the-maps-own",
        file="config/document.py",
        find="            if name not in result:\n",
        replace="            if True:\n",
        why="what a map says besides `<<: *defaults` is lost: the run trains with the defaults of the anchor",
        tests=("config/test_config_yaml.py::test_anchors_and_merge_keys_are_written_out",),
    ),
    Mutant(
        name="a-run-goes-on-with-another-global-batch",
        file="config/runs.py",
        find="            free = same_batch\n",
        replace="            free = True\n",
        why="resumed on twice the replicas the run reads other samples, with a learning rate made for half the batch",
        tests=(f"{RUNS}::test_another_run_is_reported_by_its_first_other_key",),
    ),
    Mutant(
        name="a-micro-batch-that-does-not-divide-the-ramps",
        file="config/runs.py",
        find="    micro = math.gcd(per_replica, config.tokens.micro_batch_size, *sizes)\n",
        replace="    micro = math.gcd(per_replica, config.tokens.micro_batch_size)\n",
        why="the overrides that are advised for another number of replicas are refused, or end a ramp in between",
        tests=(f"{RUNS}::test_overrides_for_more_replicas_keep_a_ramp_of_whole_micro_batches",),
    ),
    Mutant(
        name="half-of-the-keys-of-validation-validates",
        file="config/tokens.py",
        find="        return self.val_check_interval > 0 and self.limit_val_batches != 0\n",
        replace="        return self.val_check_interval > 0 or self.limit_val_batches != 0\n",
        why="a run that was not to validate stops for it at every step, or divides by an interval of -1",
        tests=(f"{RUNS}::test_validation_needs_an_interval_and_batches",),
    ),
    Mutant(
        name="a-placeholder-is-filled-in-once-only",
        file="config/runs.py",
        find='.replace("%jobid", jobid or "local")\n',
        replace='.replace("%jobid", jobid or "local", 1)\n',
        why="the folder of a run is called %jobid, and those of several jobs are one",
        tests=("config/test_config_dialects.py::test_every_placeholder_is_filled_once",),
    ),
    Mutant(
        name="the-last-step-of-the-last-stage-is-not-counted",
        file="config/warnings.py",
        find="[stage.start_training_step for stage in stages[1:]] + [steps + 1]\n",
        replace="[stage.start_training_step for stage in stages[1:]] + [steps]\n",
        why="the tokens that a run says it trains on are a step short",
        tests=("config/test_config_cli.py::test_check_answers_in_one_line",),
    ),
    Mutant(
        name="modules-beside-the-yaml-come-before-installed-ones",
        file="config/dotted.py",
        find="        sys.path.append(folder)\n",
        replace="        sys.path.insert(0, folder)\n",
        why="a tokenizers.py or profile.py beside the YAML file is imported in place of the library",
        tests=("config/test_config_errors.py::test_a_module_beside_the_yaml_file_hides_no_installed_one",),
    ),
    Mutant(
        name="numbers-with-an-exponent-are-text",
        file="config/document.py",
        find="                return int(value) if whole else value\n",
        replace="                return value\n",
        why="train_steps: 1e5 is refused, though every other tool takes it",
        tests=("config/test_config_yaml.py::test_a_scalar_is_what_it_looks_like",),
    ),
    Mutant(
        name="a-prenorm-residual-of-mamba-is-not-scaled-by-default",
        file="config/dialects.py",
        find='init.pop("rescale_prenorm_residual", True)',
        replace='init.pop("rescale_prenorm_residual", False)',
        why="a Mamba of nanotron's begins with other weights than there, and its loss cannot be compared",
        tests=("models/test_mamba.py::test_nanotron_scales_the_branches_of_a_mamba_unless_told_otherwise",),
    ),
]
