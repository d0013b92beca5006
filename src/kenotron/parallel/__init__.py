"""The mesh, the device, and one file per axis of parallelism.

mesh.py               the axes, declared once; groups, degrees and ranks by name
device.py             accelerator or CPU: which, how much memory, how fast; copies to it
data.py               data parallelism and ZeRO: gradient buckets, or FSDP2
tensor.py             tensor and sequence parallelism: column, row and vocabulary layers
collectives.py        collectives as autograd functions; sums of numbers that the host has
shared_memory.py      the same and gradient sums between ranks of one machine, on CPUs
tensor_labels.py      what its modules share: their ranks, and the part of a weight that a rank holds
partial_gradients.py  weights that a plan leaves out, whose gradient would be one rank's part
experts.py            expert parallelism: tokens sent to the ranks of their experts
context.py            context parallelism: shards of sequences, Ulysses
ring.py               ring attention and its all-gather form
cp_schedule.py        which queries meet which keys, on host integers
state_passing.py      context parallelism of recurrences: a rank's last state is the next one's first
pipeline.py           pipeline parallelism on torch's schedules
pipeline_layout.py    which rank holds which layers; bubbles
shards.py             the block of a tensor that a rank holds
ranks.py              errors, results and waiting shared by all ranks
torch_internals.py    every private name of torch.distributed that is used
"""
