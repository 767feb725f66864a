"""The tests here need Triton's interpreter; `test_kernel_interpreted.py` runs them under it."""

import os
import sys
from pathlib import Path

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parents[1]))  # kernel_references, kernel_strategies
