"""``marsray demo``: drives the public commands and the REST endpoints as a user would."""
