"""Anthropic's Messages API: its bodies, their translation to chats, and answers in its shapes."""
