"""Request traces: published files, and synthetic ones."""
