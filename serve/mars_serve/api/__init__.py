"""The REST protocol: request and response bodies, errors, text, tools, keys and their limits.

Imports no HTTP library.
"""
