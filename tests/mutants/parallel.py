"""Bugs of the layouts: every axis computes one process's gradients, or it is wrong."""

from __future__ import annotations

from mutants.mutant import Mutant, NotCounted

DATA = "layouts/test_data_parallel.py"
TENSOR = "layouts/test_tensor_parallel.py"
PIPELINE = "layouts/test_pipeline.py"
CONTEXT = "layouts/test_context_parallel.py"
FAMILIES = "layouts/test_families_on_layouts.py::test_a_layout_means_what_one_process_means"

MUTANTS = [
    Mutant(
        name="a-convolution-sees-the-rank-before-over-a-border",
        file="models/blocks/recurrence.py",
        find="    return before * same[..., None]\n",
        replace="    return before\n",
        why="a document that begins in the last tokens of a rank is mixed with the one before it on the next rank",
        tests=("layouts/test_mamba_on_layouts.py",),
    ),
    Mutant(
        name="a-sum-inside-of-a-layer-hears-one-rank",
        file="parallel/tensor.py",
        find="        y = copy_to(_RowProduct.apply(x, _local(self.weight).to(x.dtype), group, False, False), group)\n",
        replace="        y = _RowProduct.apply(x, _local(self.weight).to(x.dtype), group, False, False)\n",
        why="every rank goes on from Mamba's x_proj with its own channels, and only its own gradient comes back",
        tests=("layouts/test_mamba_on_layouts.py",),
    ),
    Mutant(
        name="fsdp-divide-factor-on-the-root-only",
        file="parallel/data.py",
        find="    for module in _sharded(root):\n        module.set_gradient_divide_factor(1.0)\n",
        replace="    for module in _sharded(root)[:1]:\n        module.set_gradient_divide_factor(1.0)\n",
        why="FSDP2's settings do not recurse: blocks average their gradients, off by the world size in silence",
        tests=(f"{DATA}::test_every_stage_on_every_mesh_is_one_process[two ranks-3-3]",),
    ),
    Mutant(
        name="weights-not-resharded-after-the-last-micro-batch",
        file="parallel/data.py",
        find="        module.set_reshard_after_backward(last, recurse=False)\n",
        replace="        module.set_reshard_after_backward(False, recurse=False)\n",
        why="ZeRO-1 and 2 keep the gathered weights beyond the step, and train on stale ones without a word",
        tests=(f"{DATA}::test_each_step_trains_on_the_weights_of_the_last",),
    ),
    Mutant(
        name="gradients-summed-in-bf16",
        file="parallel/data.py",
        find="param_dtype=compute_dtype, reduce_dtype=torch.float32",
        replace="param_dtype=compute_dtype, reduce_dtype=compute_dtype",
        why="accumulate_grad_in_fp32 is accepted, and gradients travel and add up in bf16",
        tests=(f"{DATA}::test_bf16_keeps_fp32_masters_and_fp32_sums",),
    ),
    Mutant(
        name="gradients-of-the-last-bucket-not-summed",
        file="parallel/data.py",
        find="                self._add(parameter)\n        self._start()\n",
        replace="                self._add(parameter)\n",
        why="what does not fill a bucket is never reduced: replicas drift apart in the embedding alone",
        tests=(f"{DATA}::test_replicas_sum_as_much_together_as_they_are_told",),
    ),
    Mutant(
        name="gradients-not-summed-over-cp",
        file="parallel/mesh.py",
        find='("loss", "gradient", "shard")),\n    Axis("tp"',
        replace='("loss", "shard")),\n    Axis("tp"',
        why="context-parallel ranks hold the same weights, and their gradients are not summed at ZeRO-0",
        tests=(f"{DATA}::test_every_stage_on_every_mesh_is_one_process[with cp-0-3]",),
    ),
    Mutant(
        name="sharding-forgets-cp",
        file="parallel/mesh.py",
        find='("loss", "gradient", "shard")),\n    Axis("tp"',
        replace='("loss", "gradient")),\n    Axis("tp"',
        why="the same under ZeRO 1 to 3, and hybrid",
        tests=(f"{DATA}::test_every_stage_on_every_mesh_is_one_process[with cp-1-3]",),
    ),
    Mutant(
        name="cp-ranks-read-other-samples",
        file="parallel/mesh.py",
        find='("loss", "gradient", "shard")),\n    Axis("tp"',
        replace='("batch", "loss", "gradient", "shard")),\n    Axis("tp"',
        why="ranks that share a sequence take their parts from different ones",
        tests=("layouts/test_matrix.py::test_a_layout_means_what_one_process_means",),
    ),
    Mutant(
        name="a-replicated-kv-head-counted-once",
        file="parallel/tensor.py",
        find="_local(parameter, partial=True)[rows]",
        replace="_local(parameter)[rows]",
        why="kv heads that several tp ranks share get the gradient of one rank's queries",
        tests=(f"{TENSOR}::test_gradients_of_every_parameter_are_those_of_one_process",),
    ),
    Mutant(
        name="norms-not-summed-under-reduce-scatter",
        file="parallel/tensor.py",
        find="self.per_head or (self.on_shards and self.training)",
        replace="self.per_head",
        why="norms on sequence shards learn from one rank's tokens (the sequence-parallel bug of Megatron's history)",
        tests=(f"{TENSOR}::test_gradients_of_every_parameter_are_those_of_one_process",),
    ),
    Mutant(
        name="row-bias-of-one-rank-under-reduce-scatter",
        file="parallel/tensor.py",
        find="_local(self.bias, partial=sequence)",
        replace="_local(self.bias)",
        why="a row-parallel bias learns from one rank's tokens",
        tests=(f"{TENSOR}::test_gradients_of_every_parameter_are_those_of_one_process",),
    ),
    Mutant(
        name="row-bias-added-by-every-rank",
        file="parallel/tensor.py",
        find="y + _local(self.bias, partial=sequence).to(x.dtype)",
        replace="y + _local(self.bias, partial=sequence).to(x.dtype) * self.settings.degree",
        why="a row-parallel bias is added before the sum over ranks: tp times too large",
        tests=(f"{TENSOR}::test_gradients_of_every_parameter_are_those_of_one_process",),
    ),
    Mutant(
        name="a-plan-is-not-checked",
        file="parallel/tensor.py",
        find="    plan.check(",
        replace="    (lambda _: None)(",
        why="a typo in a plan names no module, and tensor parallelism replicates the weight in silence",
        tests=("models/test_flops_and_plan.py",),
    ),
    Mutant(
        name="vocabulary-border-off-by-one",
        file="parallel/tensor.py",
        find="elsewhere = (local < 0) | (local >= self.rows)",
        replace="elsewhere = (local <= 0) | (local >= self.rows)",
        why="the first row of every rank's part of the vocabulary is nobody's",
        tests=(f"{TENSOR}::test_gradients_of_every_parameter_are_those_of_one_process",),
    ),
    Mutant(
        name="pp-gradients-scaled-by-micro-batches",
        file="parallel/pipeline.py",
        find="scale_grads=False",
        replace="scale_grads=True",
        why="torch's schedules divide gradients by the number of micro-batches unless told not to (torchtitan #2972)",
        tests=(f"{PIPELINE}::test_every_schedule_has_one_process_gradients",),
    ),
    Mutant(
        name="tied-gradient-counted-twice",
        file="parallel/pipeline.py",
        find="                to += arrived.to(to.device)\n",
        replace="                to += 2 * arrived.to(to.device)\n",
        why="the head's gradient of a tied weight reaches the embedding twice (torchtitan #1524, #2580)",
        tests=(f"{PIPELINE}::test_every_schedule_has_one_process_gradients",),
    ),
    Mutant(
        name="tied-copy-keeps-its-gradient",
        file="parallel/pipeline.py",
        find="                copy.grad = None\n",
        replace="                pass\n",
        why="the copy's gradient of the last step is added to the owner again in the next",
        tests=(f"{PIPELINE}::test_owner_and_copy_of_a_tied_weight_stay_bit_equal",),
    ),
    Mutant(
        name="rope-positions-restart-on-a-cp-rank",
        file="parallel/context.py",
        find="        positions=here(ctx.positions),\n",
        replace='        positions=here(ctx.positions) % (length // mesh.degree("cp")),\n',
        why="every context-parallel rank counts positions from 0: attention sees the wrong distances across ranks",
        tests=(f"{CONTEXT}::test_the_models_loss_and_every_gradient_are_one_processs",),
    ),
    Mutant(
        name="a-mask-that-leaks-across-shards",
        file="parallel/cp_schedule.py",
        find="in _held(key_chunks, from_, begin):",
        replace="in _held(key_chunks, 0, begin):",
        why="queries see other documents as soon as those lie on another rank",
        tests=(
            f"{CONTEXT}::test_tiles_of_random_documents_cover_each_visible_pair_once",
            f"{CONTEXT}::test_the_models_loss_and_every_gradient_are_one_processs",
        ),
    ),
    Mutant(
        name="ring-gradients-do-not-come-home",
        file="parallel/ring.py",
        find="        dkv += arrived(behind)\n",
        replace="        arrived(behind)\n",
        why="key-value gradients that other ranks computed are received and dropped (Megatron-LM #1464, #1465)",
        tests=(f"{CONTEXT}::test_each_method_is_a_plain_function_for_a_module_of_ones_own",),
    ),
    Mutant(
        name="ulysses-reads-the-wrong-key-value-head",
        file="parallel/context.py",
        find="k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)",
        replace="k.repeat(1, copies, 1, 1), v.repeat(1, copies, 1, 1)",
        why="grouped queries: head h reads key-value head h % kv_heads instead of h // group",
        tests=(f"{CONTEXT}::test_the_models_loss_and_every_gradient_are_one_processs[ulysses-False-4]",),
    ),
    Mutant(
        name="uneven-shards-end-early",
        file="parallel/shards.py",
        find="        step = -(-size[dim] // degrees[axis])\n",
        replace="        step = max(size[dim] // degrees[axis], 1)\n",
        why="of 5 rows over 4 ranks one belongs to none: it is never initialized and never saved",
        tests=("layouts/test_shards.py",),
    ),
    Mutant(
        name="a-weight-of-all-heads-takes-one-ranks-gradient",
        file="parallel/tensor.py",
        find="self.per_head or (self.on_shards and self.training)",
        replace="self.on_shards and self.training",
        why="norms of queries and keys learn from the heads of one rank alone, and ranks drift apart",
        tests=(f"{FAMILIES}[qwen3-2-tp=2]",),
    ),
    Mutant(
        name="norm-biases-not-summed-under-reduce-scatter",
        file="parallel/tensor.py",
        find="name: self._here(parameter) for name",
        replace='name: _local(parameter) if name == "bias" else self._here(parameter) for name',
        why="a LayerNorm on sequence shards sums the gradients of its weight, and forgets its bias",
        tests=(f"{FAMILIES}[starcoder2-2-tp=2 mode=REDUCE_SCATTER]",),
    ),
    Mutant(
        name="norm-over-all-heads-forgets-the-other-ranks-gradients",
        file="parallel/tensor.py",
        find="squares = copy_to(reduce_from(squares, group), group)",
        replace="squares = reduce_from(squares, group)",
        why="the loss is right, and the gradients through a norm over split features lack what other ranks do with it",
        tests=(f"{FAMILIES}[olmo2-2-tp=2 mode=REDUCE_SCATTER]",),
    ),
]

NOT_COUNTED = [
    NotCounted(
        name="reduce-scatter-by-mean-on-gpus",
        file="parallel/collectives.py",
        why="gloo sums by an all-to-all and an addition; torch's own reduce-scatter runs on accelerators only",
    ),
    NotCounted(
        name="async-tp-products-on-gpus",
        file="parallel/fused.py",
        why="torch's symmetric-memory operators need GPUs that reach each other's memory; shapes and gradients are "
        "tested with stand-ins",
    ),
]
