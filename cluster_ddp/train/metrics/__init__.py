"""What is measured during training, and where it goes.

log        what is logged of which step, and where to
losses     the loss of a step over all ranks
progress   the display of rank 0
loggers    TensorBoard and Weights & Biases
file       metrics.jsonl
"""
