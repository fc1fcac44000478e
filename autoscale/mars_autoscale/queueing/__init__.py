"""The queue before a model's replicas: its order, their credits, expected waits, and placement.

Everything here is synchronous and does no input or output; clocks are passed in. The server and
the simulator run the same code.

Imports no Ray, torch or HTTP library.
"""
