"""Training: data, layout, objective, worker loop and recipe. Knows nothing of serving."""
