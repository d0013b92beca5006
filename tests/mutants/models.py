"""Bugs of the models' maths and of the kernels under it."""

from __future__ import annotations

from mutants.mutant import Mutant, NotCounted

LLAMA = "models/test_llama_gradients.py"
LOSS = ("kernels/test_linear_cross_entropy.py",)

MUTANTS = [
    Mutant(
        name="rope-positions-in-bf16",
        file="models/blocks/rope.py",
        find="positions.unsqueeze(-1).float()",
        replace="positions.unsqueeze(-1).bfloat16()",
        why="positions past 256 are rounded to even numbers and worse: (as in old versions of transformers)",
        tests=("models/test_rope.py",),
    ),
    Mutant(
        name="rope-turns-the-wrong-way-back",
        file="kernels/rope.py",
        find="        return _rotate(grad, cos, sin, -1.0, ctx.interleaved, out), None, None, None\n",
        replace="        return _rotate(grad, cos, sin, 1.0, ctx.interleaved, out), None, None, None\n",
        why="the hand-written backward of RoPE has the sign of its forward",
        tests=("kernels/test_elementwise_kernels.py",),
    ),
    Mutant(
        name="rope-interleaved-by-halves",
        file="kernels/rope.py",
        find="        return x[..., 0::2], x[..., 1::2]\n",
        replace="        return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]\n",
        why="the two layouts of RoPE are taken for one another (every converter of Llama weights met it)",
        tests=("kernels/test_elementwise_kernels.py", LLAMA),
    ),
    Mutant(
        name="llama3-rope-blend-backwards",
        file="models/blocks/rope.py",
        find='    return keep * frequency + (1 - keep) * frequency / scaling["factor"]\n',
        replace='    return (1 - keep) * frequency + keep * frequency / scaling["factor"]\n',
        why="rope_scaling stretches the fast channels instead of the slow ones: fine below the old context, lost above",
        tests=(LLAMA,),
    ),
    Mutant(
        name="softmax-scale-of-the-hidden-size",
        file="kernels/attention.py",
        find="    scale = q.shape[-1] ** -0.5 if scale is None else scale\n",
        replace="    scale = (q.shape[1] * q.shape[-1]) ** -0.5 if scale is None else scale\n",
        why="scores are scaled by the hidden size where it should be that of a head",
        tests=("kernels/test_attention_kernel.py",),
    ),
    Mutant(
        name="causal-mask-off-by-one",
        file="kernels/attention.py",
        find=".tril_()\n",
        replace=".tril_(1)\n",
        why="the explicit backward lets every query see the token that it has to predict",
        tests=("kernels/test_attention_kernel.py",),
    ),
    Mutant(
        name="blockwise-mask-off-by-one",
        file="kernels/blockwise_attention.py",
        find=".triu(1)\n",
        replace=".triu(2)\n",
        why="a block of context parallelism shows a query the next key",
        tests=("kernels/test_blockwise_attention.py",),
    ),
    Mutant(
        name="documents-see-each-other",
        file="kernels/attention.py",
        find="    if all(len(row) == 1 for row in lengths):\n",
        replace="    if True:\n",
        why="document masking is accepted and ignored by the attention kernel",
        tests=("kernels/test_attention_kernel.py",),
    ),
    Mutant(
        name="sliding-window-a-token-too-wide",
        file="kernels/attention.py",
        find="(keys > queries - window)",
        replace="(keys >= queries - window)",
        why="Mistral's window counts the query itself: another model than the one that was published",
        tests=("models/test_families_equal_transformers.py::test_a_window_in_blocks_is_the_masked_softmax_in_float64",),
    ),
    Mutant(
        name="a-document-runs-on-into-the-next-sequence",
        file="kernels/attention.py",
        find="    borders = sorted({*cu_seqlens, *range(0, tokens, length)})\n",
        replace="    borders = sorted({*cu_seqlens, *range(0, tokens, length)} - {length})\n",
        why="the border between two sequences of a batch is lost where a document ends there",
        tests=("kernels/test_attention_kernel.py",),
    ),
    Mutant(
        name="rms-norm-epsilon-outside-of-the-root",
        file="kernels/rms_norm.py",
        find="torch.rsqrt(norm.mul_(norm).mul_(1 / hidden).add_(eps), out=r[part])",
        replace="torch.reciprocal(norm.mul_(norm).mul_(1 / hidden).sqrt_().add_(eps), out=r[part])",
        why="epsilon is added after the square root: another model for activations near zero",
        tests=("kernels/test_elementwise_kernels.py",),
    ),
    Mutant(
        name="rms-norm-statistics-in-bf16",
        file="kernels/rms_norm.py",
        find="        block = x[part].float()  # fp32: the same memory\n",
        replace="        block = x[part].clone()\n",
        why="the mean square of a bf16 row is summed up in bf16",
        tests=("kernels/test_elementwise_kernels.py",),
    ),
    Mutant(
        name="norm-epsilon-of-the-class",
        file="models/blocks/norm.py",
        find="rms_norm(x, self.weight.to(x.dtype), self.eps)",
        replace="rms_norm(x, self.weight.to(x.dtype), 1e-6)",
        why="the config's rms_norm_eps is accepted and ignored",
        tests=(LLAMA,),
    ),
    Mutant(
        name="z-loss-without-its-factor-of-two",
        file="kernels/linear_cross_entropy.py",
        find="(1.0 + 2.0 * options.z_loss * lse)",
        replace="(1.0 + options.z_loss * lse)",
        why="the gradient of the z-loss is half of its loss's",
        tests=LOSS,
    ),
    Mutant(
        name="z-loss-counted-once-a-rank",
        file="kernels/linear_cross_entropy.py",
        find="torch.cat((lse - picked, options.z_loss * lse * lse), 1)",
        replace="torch.cat((lse - picked, options.z_loss * lse * lse * (1 if ranks is None else 2)), 1)",
        why="under tp every rank has the complete z-loss, and it is summed over them (Megatron-LM #5047)",
        tests=LOSS,
    ),
    Mutant(
        name="padding-rows-take-part-in-the-softmax",
        file="kernels/linear_cross_entropy.py",
        find="    valid = weight[: max(options.rows, 1)]",
        replace="    valid = weight",
        why="rows that pad the vocabulary get probability, and a gradient",
        tests=LOSS,
    ),
    Mutant(
        name="ignored-labels-still-push",
        file="kernels/linear_cross_entropy.py",
        find="    factors = torch.where(real[:, None], options.scale * slope / total, 0.0)\n",
        replace="    factors = options.scale * slope / total\n",
        why="masked tokens carry no loss but a gradient",
        tests=LOSS,
    ),
    Mutant(
        name="initial-std-of-the-wrong-depth",
        file="models/family.py",
        find="std / math.sqrt(2 * ",
        replace="std / math.sqrt(",
        why="projections into the residual stream are damped for half of its additions",
        tests=("models/test_initial_weights.py",),
    ),
    Mutant(
        name="a-shard-has-its-own-random-numbers",
        file="models/initialization.py",
        find="key, shard.shape, shard.offset, distribution.std",
        replace="key, shard.tensor.shape, [0] * shard.tensor.dim(), distribution.std",
        why="every rank fills its shard from the start of the stream: tp copies of one block of weights",
        tests=("models/test_initial_weights.py",),
    ),
    Mutant(
        name="tied-weights-come-apart",
        file="models/__init__.py",
        find="    model.tie_weights()  # to_empty gave the two names of a tied matrix a memory each\n",
        replace="",
        why="tie_word_embeddings is silently undone when a meta model gets memory (torchtitan #2252)",
        tests=("models/test_initial_weights.py",),
    ),
]

NOT_COUNTED = [
    NotCounted(
        name="memory-efficient-kernels-log-sum-exp",
        file="kernels/blockwise_attention.py",
        why="the fp32 kernel of CUDA pads its log-sum-exp and wants a key-value head for every query head",
    ),
]
