"""Measures checkpoints: quality, calibration, the frontier, and whether one may replace another."""
