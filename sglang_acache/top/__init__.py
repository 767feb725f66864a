"""``python -m sglang_acache top``: a live view of a server, in a terminal."""
