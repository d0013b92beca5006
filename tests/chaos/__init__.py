"""Faults at random moments of runs: of ranks that are replaced, and of one process that starts again."""
