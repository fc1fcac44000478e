"""The decoding engine. Imports no Ray or HTTP library."""
