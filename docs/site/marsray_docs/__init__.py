"""What the documentation site generates from the code: references, figures, and runs of blocks."""
