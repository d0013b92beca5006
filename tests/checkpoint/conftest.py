"""What the tests of this folder share: the fork of gloo ranks lives with the layout tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "layouts"))
