"""The server's commands, as `marsray` loads them."""
