"""Turns the engine's outputs into response bodies."""
