"""The varied bed: tasks of mixed certainty, models trained on them, and what masks can give."""
