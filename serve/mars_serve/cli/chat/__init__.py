"""The conversation of ``marsray chat``."""
