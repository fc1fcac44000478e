"""Connections to Ray, jobs on a remote cluster, and child processes."""
