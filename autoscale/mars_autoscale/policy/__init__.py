"""The policy: how many replicas there are, and how far τ may go."""
