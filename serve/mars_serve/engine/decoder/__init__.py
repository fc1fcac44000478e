"""Decoder layers with merged weights and fused operators, in place of transformers' own."""
