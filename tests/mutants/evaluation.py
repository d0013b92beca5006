"""Bugs of evaluation: likelihoods of other tokens, other metrics, checkpoints that are gone before they are read."""

from mutants.mutant import Mutant

SCORING = "evaluation/test_scoring.py"
RUNS = "evaluation/test_evaluation_of_runs.py"

MUTANTS = [
    Mutant(
        name="scores-are-one-token-late",
        file="evaluation/scoring.py",
        find="        kept += range(end - scored, end)\n",
        replace="        kept += range(end - scored - 1, end - 1)\n",
        why="the first token of a continuation is scored by the logits of the one before the context's last",
        tests=(f"{SCORING}::test_each_is_what_the_sequence_alone_says",),
    ),
    Mutant(
        name="long-contexts-lose-their-end",
        file="evaluation/scoring.py",
        find="        tokens = (*context, *continuation)[-(longest + 1) : -1]\n",
        replace="        tokens = (*context[: longest + 1 - len(continuation)], *continuation)[:-1]\n",
        why="of a prompt that is too long the question is cut off, not the first examples",
        tests=(f"{SCORING}::test_of_a_text_that_is_too_long_the_beginning_is_cut",),
    ),
    Mutant(
        name="shared-inputs-forget-how-many-are-scored",
        file="evaluation/scoring.py",
        find="inputs.setdefault((tokens, len(continuation)), [])",
        replace="inputs.setdefault((tokens, 1), [])",
        why="of a continuation of several tokens only the last is scored",
        tests=(f"{SCORING}::test_each_is_what_the_sequence_alone_says",),
    ),
    Mutant(
        name="greedy-if-any-token-is",
        file="evaluation/scoring.py",
        find="bool((best == labels).all())",
        replace="bool((best == labels).any())",
        why="exact matches are counted where one token of several is the likeliest",
        tests=(f"{SCORING}::test_greedy_is_what_the_model_would_write",),
    ),
    Mutant(
        name="training-compared-in-fp32",
        file="evaluation/mismatch.py",
        find="dtype_of(config.model.dtype)",
        replace="torch.float32",
        why="training looks nearer to fp32 than the run is, and a fault of its bf16 path is not seen",
        tests=("evaluation/test_mismatch.py::test_distances_are_those_of_the_definition",),
    ),
    Mutant(
        name="bits-per-character",
        file="evaluation/harness.py",
        find="/ len(answers[right].encode()) / math.log(2)",
        replace="/ len(answers[right]) / math.log(2)",
        why="bits per byte count characters, which depends on the language (nousnet #153)",
        tests=("evaluation/test_harness.py::test_the_metrics_are_those_of_the_likelihoods",),
    ),
    Mutant(
        name="retention-removes-what-is-evaluated",
        file="observers/evaluation.py",
        find='        run.checkpoints.protected.add(("evaluation", step))\n',
        replace="",
        why="a slow evaluation finds its checkpoint gone",
        tests=(f"{RUNS}::test_slow_evaluations_leave_checkpoints_out_and_retention_leaves_theirs_alone",),
    ),
    Mutant(
        name="lighteval-without-its-examples",
        file="config/lighteval.py",
        find="        shots |= set(fields[1:2])\n",
        replace="",
        why="tasks run with another number of examples than nanotron's section says",
        tests=("config/test_config_dialects.py::test_nanotrons_lighteval_becomes_evaluation",),
    ),
]
