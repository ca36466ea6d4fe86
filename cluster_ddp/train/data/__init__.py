"""The training data: the order of its samples, fetching them, and each rank's batches from step to step."""
