"""The MARS method as pure functions, its modes, and the reference decoder."""
