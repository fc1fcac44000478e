"""Runs ``marsray calibrate``: fits confidences to how often they are right."""
