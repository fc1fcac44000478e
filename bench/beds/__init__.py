"""Beds on which ways of training are compared: varied tasks, and functions of real code."""
