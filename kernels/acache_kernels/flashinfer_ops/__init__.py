"""Implementations through FlashInfer. Never run on hardware so far."""
