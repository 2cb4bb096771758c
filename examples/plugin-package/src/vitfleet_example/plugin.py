"""The package as a plug-in file, for `--plugin` without installing it: its import registers all components."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import vitfleet_example  # noqa: F401
