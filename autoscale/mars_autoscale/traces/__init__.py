"""Request traces: files that others publish, and synthetic ones."""
