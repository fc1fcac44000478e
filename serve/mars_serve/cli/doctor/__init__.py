"""The checks of ``marsray doctor``."""
