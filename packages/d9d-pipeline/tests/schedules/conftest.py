"""Lets the tests of this folder import the schedules of torch."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
