"""Checks and records that every HTTP request passes before it reaches an endpoint."""
