"""Runs ``marsray eval``: scores a checkpoint on held-out conversations."""
