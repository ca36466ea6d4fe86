"""Observes the program around a custom loop, and reports or refuses whatever no checkpoint would contain.

first_steps                              inspects everything the program holds during its first two steps, with:
carried, copies, overlooked, queues,     state that steps change but that was not passed in
schedulers, gradients, sources, counts,
elsewhere, rounds, in_loss, remembered,
before_batches, other_handlers
taking, other_loaders, changed_data      how the loop reads its data
mode                                     a model left in evaluation mode
other_optimizers, unfrozen               training of what was not passed in, or what DDP does not synchronize
saved                                    what is saved, and how to have more saved, for some of these
bodies, matters                          the source of what runs, and what in it the training depends on, for these
"""
