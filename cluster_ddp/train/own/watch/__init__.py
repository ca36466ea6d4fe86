"""What is seen of a program around its own loop, and then told or refused: no checkpoint holds it.

first_steps                              looks at all that the program holds while its first two steps run; of that,
carried, copies, overlooked, queues,     what steps change and nobody has passed in
schedulers, gradients, rank_buffers,
sources, counts, comm_hooks
taking, other_loaders, changed_data      how the loop reads its data
mode                                     a model that stays in evaluation mode
other_optimizers, unfrozen               training of what was not passed in, or that DDP leaves to each rank
"""
