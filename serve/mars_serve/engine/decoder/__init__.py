"""Changes a model's own layers, in place, before an engine runs them."""
