"""Imported first by the process that ranks of tests are forked from: its imports take a fifth less; ranks collect."""

import gc

gc.disable()
