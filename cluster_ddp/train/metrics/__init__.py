"""What is measured of a training, and where it goes: metrics.jsonl, the display, the loggers."""
