"""Metrics of replicas and of the ingress, and their way to Prometheus and Ray."""
