"""Chat data: conversations, and answers that can be checked."""
