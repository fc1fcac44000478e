"""Simulates a cluster under autoscaling policies, the real one among them."""
