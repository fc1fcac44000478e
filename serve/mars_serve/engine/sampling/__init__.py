"""Chooses tokens from logits: sampling parameters, grammars, log-probabilities."""
