"""The mesh, the device, and one file per axis of parallelism.

mesh.py               the axes, declared once; groups, degrees and ranks by name
device.py             accelerator or CPU: choice, memory, peak FLOP/s, copies to it
data.py               data parallelism and ZeRO: gradient buckets, or FSDP2
tensor.py             tensor and sequence parallelism: column, row and vocabulary layers
collectives.py        collectives as autograd functions; sums of host numbers
shared_memory.py      collectives and gradient sums between ranks of one machine, on CPUs
tensor_labels.py      shared code of its modules: ranks, and local shards of weights
partial_gradients.py  finds weights missing in a plan, whose gradients would be incomplete on every rank
experts.py            expert parallelism: tokens sent to the ranks of their experts
context.py            context parallelism: shards of sequences
ring.py               ring attention and its all-gather form
ulysses.py            attention of whole sequences for some heads of each rank
cp_schedule.py        which queries attend to which keys, on host integers
state_passing.py      context parallelism of recurrences: a rank's last state is the next rank's first
pipeline.py           pipeline parallelism on torch's schedules
pipeline_layout.py    which rank holds which layers; bubbles
shards.py             the block of a tensor that a rank holds
ranks.py              share errors and results between ranks, and wait for all
torch_internals.py    all uses of private names of torch.distributed
"""
