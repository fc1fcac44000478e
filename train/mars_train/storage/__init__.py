"""Stores directories and tensors, complete or not at all, on local disk or remote storage."""
