"""Evaluation: what a task measures on data that it does not train on.

evaluate        each sample once, on any number of ranks, without affecting training
weights         the weights meant for it
metric_names    which metrics there will be, read from the task's source
"""
