"""What a run will need, predicted by running its own code on ranks that are not there.

memory.py        the peak of every kind of rank, by what it consists of: read `plan_memory` first
verdict.py       whether that fits, and the nearest change that does
planning.py      all that is planned of a run
explaining.py    the same in words, and what makes each part less
page.py          a plan as pictures on one HTML page (page.html)
serving.py       that page with fields to change the run
search.py        layouts of as many GPUs, the fastest first
speed.py         tokens a second, MFU, days, energy
timeline.py      how long a step takes, from the traces of its ranks
rates.py         how long a GPU takes for an operator, a group for a collective
hardware.py      GPUs that a run may be planned for
measuring.py     what those of this machine reach
rehearsal.py     a rank of a layout, built and stepped without memory
ledger.py        follows every storage: its bytes, its life, and what made it
trace.py         follows what a step asks of a GPU and sends to other ranks
stand_in.py      a GPU that is not there
"""
