"""The checkpoint engines, which `kenotron.checkpoint.engine` finds by name.

synchronous.py  SynchronousEngine: saves in the call
background.py   AsyncEngine, DataStatesEngine: a save as the training process runs it
staging.py      copies tensors, in blocks, into memory that the writer shares
ring.py         this memory: a ring of bytes that are filled, written and freed
client.py       the training process's side of the writer process
writer.py       the process that writes
"""
