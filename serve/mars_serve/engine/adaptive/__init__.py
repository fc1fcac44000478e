"""Chooses how many masks a step feeds, and paces steps to another machine's times."""
