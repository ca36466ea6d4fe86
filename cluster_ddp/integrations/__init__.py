"""Frameworks that run the loop themselves. Importing the module of one imports that framework.

transformers      transformers' Trainer as a loop of a run
derived_trainer   what classes derived from it keep in their attributes, as those of TRL do
own_callbacks     what its callbacks keep
lightning         Lightning's Trainer as a loop of a run
joining           what both use
"""
