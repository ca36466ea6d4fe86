"""The state of a training: as what a checkpoint holds of it, and whether that is all there is."""
