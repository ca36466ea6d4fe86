"""The state of a training run as a checkpoint contains it, and checks that it is complete."""
