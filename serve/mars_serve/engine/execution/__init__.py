"""Runs the model on one step, eagerly or as CUDA graphs, and accepts its tokens."""
