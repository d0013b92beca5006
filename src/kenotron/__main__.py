"""Run `kenotron` as `python -m kenotron`."""

from kenotron.cli import main

main()
