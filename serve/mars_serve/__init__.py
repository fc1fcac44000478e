"""Serves MARS checkpoints on Ray Serve: an engine behind OpenAI-compatible REST endpoints."""
