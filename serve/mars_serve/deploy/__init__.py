"""Deploys the server on Ray Serve: deployments, routing, proxies, start and shutdown."""
