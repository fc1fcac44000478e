"""Attention over paged keys and values: the interface and its backends."""
