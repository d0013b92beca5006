"""The engines; `kenotron.checkpoint.engine` finds them by name.

synchronous.py  SynchronousEngine: everything in the call
background.py   AsyncEngine, DataStatesEngine: the order of things in the training process
plan.py         which bytes this rank writes, worked out once and used again
staging.py      copies of tensors, in blocks, into memory that the writer shares
ring.py         that memory: blocks that are filled, written and free again
client.py       the writer as the training process sees it
writer.py       the process that writes
"""
