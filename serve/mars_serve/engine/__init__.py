"""The decoding engine. Knows nothing of Ray, HTTP or text."""
