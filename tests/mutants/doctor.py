"""Bugs of the doctor: a machine that is wrong and called fine, or fine and blamed; something private on the page."""

from mutants.mutant import Mutant

RULES = "doctor/test_rules.py"
FACTS = "doctor/test_facts.py"
COMMAND = "doctor/test_doctor_command.py"
SELF_TEST = "doctor/test_self_test.py"

MUTANTS = [
    Mutant(
        name="a-machine-with-errors-passes",
        file="doctor/__init__.py",
        find='all(test.passed for test in tests) and all(finding.severity != "error" for finding in findings)',
        replace="all(test.passed for test in tests)",
        why="a job that asks the doctor first trains on a disk that is full, or without its GPUs",
        tests=(f"{COMMAND}::test_a_torch_that_cannot_be_imported_is_the_page_s_error",),
    ),
    Mutant(
        name="errors-of-rules-are-no-verdict",
        file="doctor/page.py",
        find='    failed += [finding.name for finding in report.findings if finding.severity == "error"]\n',
        replace="",
        why="the page ends with 'Training works here' under an error",
        tests=(f"{COMMAND}::test_a_torch_that_cannot_be_imported_is_the_page_s_error",),
    ),
    Mutant(
        name="the-last-step-after-a-resume-is-not-compared",
        file="doctor/self_test.py",
        find="    for step in range(SAVED + 1, STEPS + 1):\n",
        replace="    for step in range(SAVED + 1, STEPS):\n",
        why="a resumed run that ends elsewhere passes",
        tests=(f"{SELF_TEST}::test_runs_are_equal_within_what_is_allowed",),
    ),
    Mutant(
        name="a-loss-that-is-not-a-number-is-right",
        file="doctor/self_test.py",
        find="            if not abs(one - other) <= allowed * abs(one):  # also where one is NaN\n",
        replace="            if abs(one - other) > allowed * abs(one):\n",
        why="a device that computes NaN passes: no comparison with NaN is true",
        tests=(f"{SELF_TEST}::test_runs_are_equal_within_what_is_allowed",),
    ),
    Mutant(
        name="a-gpu-of-a-job-is-tested-by-another-number",
        file="doctor/__init__.py",
        find='listed[n] if listed != [""] else str(n)}',
        replace="str(n)}",
        why="with CUDA_VISIBLE_DEVICES=4,5 the GPUs 0 and 1 of somebody else are tested",
        tests=(f"{COMMAND}::test_every_gpu_is_tested_alone_and_then_all_together",),
    ),
    Mutant(
        name="secrets-of-the-environment-on-the-page",
        file="doctor/settings.py",
        find="if LISTED.match(name) and not PRIVATE_NAME.search(name)]",
        replace="if LISTED.match(name)]",
        why="a key stands in a bug report that is public",
        tests=(f"{FACTS}::test_settings_show_nothing_private",),
    ),
    Mutant(
        name="a-job-s-rank-is-inherited",
        file="doctor/limited.py",
        find=" if not name.startswith(RANK_NAMES)}",
        replace="}",
        why="within a job the self-test waits for the other ranks until its time is over, and the machine is blamed",
        tests=(f"{FACTS}::test_a_job_s_ranks_are_not_those_of_what_is_called",),
    ),
    Mutant(
        name="the-soft-limit-of-open-files",
        file="doctor/environment.py",
        find="resource.getrlimit(resource.RLIMIT_NOFILE)[1]",
        replace="resource.getrlimit(resource.RLIMIT_NOFILE)[0]",
        why="every machine with the usual 1024 is blamed, though a rank raises it",
        tests=(f"{FACTS}::test_the_limit_of_open_files_is_what_ranks_raise_it_to",),
    ),
    Mutant(
        name="machine-code-of-an-older-gpu-runs",
        file="doctor/rules.py",
        find='(kind == "compute" or built[0] == gpu[0])',
        replace="True",
        why="a torch without kernels for a new GPU passes: the run ends with 'no kernel image' in its first step",
        tests=(f"{RULES}::test_gpus_need_code_of_their_major_version_or_ptx",),
    ),
    Mutant(
        name="a-clock-that-is-behind-is-right",
        file="doctor/rules.py",
        find="if skew is not None and abs(skew) >= SKEW_S:",
        replace="if skew is not None and skew >= SKEW_S:",
        why="files that look minutes old are written over as abandoned, and nothing is found",
        tests=(f"{RULES}::test_what_is_wrong_is_found_by_name_and_nothing_else",),
    ),
    Mutant(
        name="memory-in-use-is-taken-for-free",
        file="doctor/rules.py",
        find="gpu.memory_total, gpu.memory_total - gpu.memory_free",
        replace="gpu.memory_total, gpu.memory_free",
        why="an empty GPU is blamed on other processes, and one that a crashed run fills is not",
        tests=(RULES,),
    ),
]
