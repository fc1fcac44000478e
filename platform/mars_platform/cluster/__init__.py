"""Connections to Ray clusters, jobs on remote ones, and child processes."""
