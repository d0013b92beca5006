"""`python -m kenotron`: the same as `kenotron`."""

from kenotron.cli import main

main()
