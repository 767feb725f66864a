"""Independent answers to compare the server with: random checkpoints, `transformers`, plain reference loops.

Nothing here imports ``sglang_acache``.
"""
