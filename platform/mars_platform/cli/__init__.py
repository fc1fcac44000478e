"""The frame of the `marsray` command, and what commands show and write."""
