"""The view of a server's load that ``marsray top`` shows."""
