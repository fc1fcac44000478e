"""Proposes drafts that do not come from the model's own masks."""
