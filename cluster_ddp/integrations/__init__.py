"""Frameworks that run the loop themselves: one module for each. Importing a module imports its framework."""
