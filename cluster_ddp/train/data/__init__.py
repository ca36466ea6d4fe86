"""The training data: the order of its samples, fetching them, and what a rank trains on from step to step."""
