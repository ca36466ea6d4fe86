"""Training loops of one's own: a DataLoader and a loop that stay as they are, and are resumed exactly."""
