"""Measures what each τ costs in quality and gives in speed."""
