"""Answers the lines of files beside other requests, by way of the application itself."""
