"""One module for each group of REST endpoints."""
