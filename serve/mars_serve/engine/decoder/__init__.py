"""What is changed in a model's own layers before an engine runs them."""
