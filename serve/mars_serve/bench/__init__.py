"""Side-by-side benchmarks of decoding: marsray's engine and what else decodes the same models."""
