"""Runs the model on one step: forward pass, CUDA graphs, compiled model, packed weights."""
