"""Independent answers to compare the server with: `transformers` and plain reference loops.

Of ``sglang_acache`` they use the writer of random checkpoints, nothing else; ``sglang_runner`` runs the models.
"""
