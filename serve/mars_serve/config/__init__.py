"""Settings of a server, and the types that describe what it serves."""
