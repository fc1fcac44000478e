"""The checks and records that every HTTP request passes on its way to an endpoint."""
