"""How often is `kenotron compare` right? Random pairs of layouts that agree, and seeded faults: `make compare-power`.

pairs.py     clean pairs: a small config and another layout of it, functions of a number
faults.py    bugs as patches, the run in which each bites, and the parameter that has to be named
run.py       the command, and its table
"""
