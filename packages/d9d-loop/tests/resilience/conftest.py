"""What the tests of faults share is found by its name, in the ranks too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
