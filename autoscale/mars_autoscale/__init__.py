"""Autoscaling: one policy over the confidence threshold and the replica count."""
