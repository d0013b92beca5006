"""Runs that are killed again and again, and resumed."""
