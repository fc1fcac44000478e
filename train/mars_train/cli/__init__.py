"""The trainer's commands of `marsray`."""
