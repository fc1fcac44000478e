"""The HTTP side of the server: FastAPI application, endpoints and middleware."""
