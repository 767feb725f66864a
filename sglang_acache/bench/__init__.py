"""Measurements that anyone can repeat on their own model and machine: ``python -m sglang_acache.bench``."""
