"""Predict the memory and the speed of a run, by running its code on simulated ranks.

memory.py        the peak memory of every kind of rank, by category: read `plan_memory` first
verdict.py       whether it fits, and the nearest change that makes it fit
planning.py      the complete plan of a run
explaining.py    explains a plan, and how to reduce each part
page.py          draws a plan on an HTML page (page.html)
serving.py       serves the page with fields to change the run
search.py        searches layouts for the same number of GPUs, fastest first
speed.py         tokens per second, MFU, days, energy
timeline.py      simulates the time of a step from the traces of its ranks
rates.py         the time of a GPU for an operator, and of a group for a collective
hardware.py      the kinds of GPUs that a run can be planned for
measuring.py     measures the rates of this machine's GPUs
rehearsal.py     builds and steps a rank of a layout without memory
ledger.py        records every storage: its bytes, its lifetime, and the code that allocated it
trace.py         records the operators and communication of a step
stand_in.py      a simulated GPU
"""
