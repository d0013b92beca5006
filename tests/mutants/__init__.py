"""Bugs that hurt this field, each as a small patch of this code, to see whether the tests notice.

    make mutants                    apply each in a copy of the repository, run the tests it names, list the survivors
    make mutants ONLY=name          one of them (or several: ONLY="name other")

A test suite's power is what it would catch. Every entry of the tables in this package is a mistake that was really
made, here or in another library, and went unnoticed: a gradient counted twice, a token read by two ranks, a
checkpoint announced before its bytes are on the disk. At least one of its tests fails on it; a mutant that none
notices ("survivor") asks for a test, in the file where one who looks for it would look.

`mutant.py` says what an entry consists of; one file per package holds them; `run.py` runs them;
`test_mutants_apply.py`, a quick test, keeps the tables from rotting.
"""
