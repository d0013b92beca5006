"""What runs have logged, read from their folders. No torch here, and no process of a run is needed.

files.py      the files that have a line for each step
logged.py     a run's folder
summary.py    a run in one line: its state, its steps, its losses
plot.py       their losses, in the terminal
report.py     one HTML page of runs, from page.html
"""
