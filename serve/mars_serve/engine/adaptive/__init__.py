"""Chooses how many masks a step feeds, from measured step times and acceptance."""
