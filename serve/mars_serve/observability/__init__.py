"""Metrics of replicas and of the ingress."""
