"""Make the shared modules of the fault tests importable, also in the ranks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
