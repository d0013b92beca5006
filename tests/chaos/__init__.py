"""Faults at random moments of one job, whose ranks are replaced."""
