"""Implementations in plain torch: the reference on every device, and the fast path on CPUs."""
