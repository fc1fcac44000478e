"""Measures the frontier: the quality that each τ costs and the speed that it gives."""
