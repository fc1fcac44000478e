"""Fits confidences to how often they are right."""
