"""A replica of a model: its engine process, its inner loop, and its link to the governor."""
