"""Copies between the host and the device that neither side waits for."""
