"""A replica of a model: its engine process, its part in autoscaling, its link to the governor."""
