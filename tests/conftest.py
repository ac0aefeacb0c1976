"""Lets the tests import the modules at the root of the repository, wherever pytest is started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
