"""Turns a request's body into what the engine is asked for."""
