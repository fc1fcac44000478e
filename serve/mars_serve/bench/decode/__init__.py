"""`marsray bench decode`: the engine beside other ways to decode the same model."""
