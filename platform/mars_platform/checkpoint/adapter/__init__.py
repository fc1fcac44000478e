"""Adapters that act at mask positions only, and leave the model that they belong to alone."""
