"""Judges a frontier by audits of served outputs."""
