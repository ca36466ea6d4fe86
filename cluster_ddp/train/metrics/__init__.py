"""What is measured during training, and where it goes: metrics.jsonl, the display, the loggers."""
