"""Replays traces against autoscaling policies, as events; the policies are the real ones."""
