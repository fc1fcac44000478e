"""The trainer's commands, as `marsray` loads them."""
