"""OpenAI's Responses API: its bodies, their translation to chats, and the answers in its shapes."""
