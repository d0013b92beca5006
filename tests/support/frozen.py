"""Imported by a process that forks others: the modules of `preload`, which garbage collections leave alone.

While they are imported, collections would take a second. A child's first one would look at, and so copy, every page:
half a second of each rank.
"""

import gc
import importlib

from support.preload import PRELOAD

gc.disable()
for module in PRELOAD:
    importlib.import_module(module)
gc.freeze()
gc.enable()
