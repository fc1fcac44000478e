"""Checkpoint directories: weights, metadata, calibration and manifests."""
