"""Turns what the engine gives into response bodies."""
