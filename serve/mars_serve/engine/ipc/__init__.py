"""Runs the engine in a process of its own and speaks with it over a socket pair."""
