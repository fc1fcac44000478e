"""Sends a recipe to a remote Ray cluster as a job."""
