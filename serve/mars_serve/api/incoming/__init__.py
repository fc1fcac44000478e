"""Turns request bodies into checked prompts, grammars and decoding options for the engine."""
