"""Implementations in Triton. Never run on a GPU so far: interpreter and ahead-of-time compiler only."""
