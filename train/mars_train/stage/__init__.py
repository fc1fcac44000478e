"""Trains one stage on one worker: steps, checkpoints, held-out scores. Imports no Ray."""
