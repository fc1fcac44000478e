"""Runs the stages of a recipe on Ray Train."""
