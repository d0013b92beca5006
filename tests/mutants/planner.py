"""Bugs of the planner: a run that is said to fit and does not, or the other way round."""

from __future__ import annotations

from mutants.mutant import Mutant

PEAK = "planner/test_planned_memory.py::test_the_peak_of_a_step_is_that_of_real_ranks"

TIMES = "planner/test_timeline.py"
ALL_MICRO_BATCHES = f"{TIMES}::test_a_step_takes_as_long_as_if_all_its_micro_batches_were_followed"

MUTANTS = [
    Mutant(
        name="sharded-weights-come-at-no-time",
        file="planner/trace.py",
        find=" reduce_scatter_single reduce_scatter",
        replace="",
        why="torch 2.13 calls FSDP2's collectives by new names: a step of ZeRO 3 takes as long as without others",
        tests=("planner/test_planned_traffic.py",),
    ),
    Mutant(
        name="a-queue-does-not-wait",
        file="planner/timeline.py",
        find="                    _wait(rank, queue, moment, reason)",
        replace="                    pass",
        why="a step takes as long as its computation, whatever is sent",
        tests=(f"{TIMES}::test_a_transfer_beside_computation_is_waited_for_only_as_long_as_it_is_longer",),
    ),
    Mutant(
        name="missing-micro-batches-take-the-mean-of-stages",
        file="planner/timeline.py",
        find="missing * max(sum(parts.values()) for parts in more)",
        replace="missing * sum(sum(parts.values()) for parts in more) / len(more)",
        why="a pipeline is as slow as its slowest stage",
        tests=(ALL_MICRO_BATCHES,),
    ),
    Mutant(
        name="gathered-weights-are-never-freed",
        file="planner/ledger.py",
        find="                self._born(storage._cdata, size)\n",
        replace="                self._born(storage._cdata, known.size or size)\n",
        why="a plan for ZeRO 3 holds the weights of all layers at once: FSDP2 frees by resizing storages",
        tests=("planner/test_ledger.py::test_storages_that_are_resized_count_as_large_as_they_are",),
    ),
    Mutant(
        name="operators-of-ours-need-nothing-inside",
        file="planner/ledger.py",
        find="WHOLE = attention.OPERATORS | selective_scan.OPERATORS\n",
        replace="WHOLE = attention.OPERATORS\n",
        why="a plan for Mamba lacks the states of all tokens, which its backward pass makes again",
        tests=(
            "planner/test_planned_memory.py::test_torchs_allocator_says_the_same[mamba|dp=1|tokens.sequence_length=8]",
        ),
    ),
    Mutant(
        name="a-send-holds-nothing",
        file="planner/trace.py",
        find="        self.tensors, self._wait = tensors, wait\n",
        replace="        self.tensors, self._wait = [], wait\n",
        why="a plan for an interleaved pipeline is a tenth too small: what is sent lives until the schedule is done",
        tests=(f"{PEAK}[llama|pp=2 engine=interleaved_1f1b accum=4]",),
    ),
    Mutant(
        name="dtensors-count-whole",
        file="planner/ledger.py",
        find="        if not PLAIN.issuperset(types):",
        replace="        if False:",
        why="each rank is planned to hold the moments of all shards",
        tests=("planner/test_planned_memory.py::test_a_large_model_on_thousands_of_gpus",),
    ),
    Mutant(
        name="fake-tensors-take-another-kernel",
        file="kernels/rms_norm.py",
        find="PLAIN = (Tensor, FakeTensor)",
        replace="PLAIN = (Tensor,)",
        why="a plan counts torch's composition of RMSNorm, which keeps more than the kernel of the run",
        tests=(PEAK,),
    ),
    Mutant(
        name="attention-planned-with-a-matrix-of-scores",
        file="planner/stand_in.py",
        find='        patch.object(F, "scaled_dot_product_attention", _flash),\n',
        replace="",
        why="plans for GPUs are twice too large at long sequences",
        tests=("planner/test_planned_memory.py::test_attention_on_a_gpu_keeps_no_matrix_of_scores",),
    ),
    Mutant(
        name="checkpoint-of-one-rank",
        file="planner/memory.py",
        find="math.prod(shard.shape) * shard.tensor.element_size()",
        replace="shard.tensor.numel() * shard.tensor.element_size()",
        why="a checkpoint is planned as large as what the first rank of every stage writes",
        tests=("planner/test_planned_memory.py::test_a_checkpoint_is_as_large_on_every_layout",),
    ),
    Mutant(
        name="micro-batches-without-the-host",
        file="planner/timeline.py",
        find="if (idle := rank.asked / count - sum(parts.values())) > 0:",
        replace="if (idle := 0.0) > 0:",
        why="a pipeline of small kernels is planned to be twice as fast",
        tests=("planner/test_timeline.py::test_micro_batches_that_were_not_followed_wait_for_a_slow_host",),
    ),
]
