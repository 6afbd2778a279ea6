"""Numbers and vectors as tokens, and back."""
