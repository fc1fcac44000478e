"""The policy of both loops: how many replicas there are, and how far τ may go.

Imports no Ray, torch or HTTP library.
"""
