"""The REST protocol without HTTP: bodies, errors, text and access rules."""
