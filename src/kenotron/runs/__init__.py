"""Read the logs of runs from their folders, without torch, and without a process of the run.

files.py      the JSON Lines files of a run
logged.py     reads a run's folder
summary.py    summarizes a run in one line: its state, its steps, its losses
plot.py       draws the losses of runs in the terminal
report.py     makes an HTML page of runs, from page.html
"""
