"""Frameworks that run the loop themselves: one module for each, which imports the framework when it is imported."""
