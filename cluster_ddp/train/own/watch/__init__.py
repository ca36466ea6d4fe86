"""Observes the program around a custom loop, and reports or refuses whatever no checkpoint would contain.

first_steps                              inspects everything the program holds during its first two steps, with:
carried, copies, overlooked, queues,     state that steps change but that was not passed in
schedulers, gradients, sources, counts,
elsewhere, rounds, in_loss, in_functions,
in_objects, remembered, before_batches,
other_handlers
taking, other_loaders, other_workers,    how the loop reads its data
changed_data
mode                                     a model left in evaluation mode
other_optimizers, unfrozen               training of what was not passed in, or what DDP does not synchronize

Most of them ask the same questions, each answered in one place:
bodies                                   what runs again and again, and its source
train/objects/live_variables             whether that reads what an earlier pass has left (loop-carried)
flow, called                             what the loops do in the functions that they call
matters                                  whether the loss, the update, a rate, the end or the best model depends on it
saved                                    whether a checkpoint contains it, and how to have it contain more
reported                                 whether another watch has reported it already
"""
