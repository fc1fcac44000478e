"""`marsray bench load`: replays a trace against a running server."""
