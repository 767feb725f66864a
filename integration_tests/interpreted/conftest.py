"""The tests here need Triton's interpreter; ``integration_tests/test_interpreted.py`` runs them under it."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
