"""The endpoints behind the live dashboard: its stream of figures."""
