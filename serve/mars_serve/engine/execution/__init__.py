"""Runs the model on one step, eagerly, compiled or as CUDA graphs, and accepts its tokens."""
