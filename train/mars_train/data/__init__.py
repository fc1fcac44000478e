"""Prepares training data: from files of conversations to a store of token ids."""
