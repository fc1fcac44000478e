"""The operators by which positions of a model act on one another, bound into its own modules."""
