"""The server's commands for the `marsray` command line."""
