"""The REST endpoints: OpenAI's, and marsray's own beside them."""
