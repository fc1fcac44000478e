"""The demo, which uses the public commands and the REST endpoints as a user would."""
