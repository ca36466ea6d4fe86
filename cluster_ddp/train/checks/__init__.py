"""Checks: what would fail later, or train or resume otherwise than meant, is refused or told in the first steps.

step_checks                             what is checked around the steps of a task, with:
first_steps, frozen_layers              whether all gradients are summed over the ranks
single_samples                          a BatchNorm that an epoch leaves a single sample
compiling                               whether torch goes on compiling
differences                             what differs between the ranks and must not
unsuited_models, unsuited_optimizers    what cannot be trained, saved or restored as it is
unsaved                                 what training changes and no checkpoint contains
remedies                                what several refusals advise
"""
