"""Accuracy through the server's API with lm-eval's own clients: tasks with shared text in three positions."""
