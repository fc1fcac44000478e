"""Directories and tensors on local disk or remote storage that are complete or absent."""
