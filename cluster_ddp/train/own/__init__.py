"""Training loops of one's own: a DataLoader and a loop that stay as they are, and are resumed exactly.

run, loop, loader, parts, blocks         what a program calls, and what happens around each of its steps
handed, kept, twins                      what is saved: what the program hands over, and what else it keeps
batches, loader_copy, stream_batches,    the batches of its DataLoader, from any place on
geometry, held_data
first_steps, program, values             looking at what the program holds while its first steps run
carried, copies, overlooked, queues,     warnings about what steps change and no checkpoint holds
schedulers, gradients, rank_buffers,
sources, counts
taking, other_loaders, changed_data,     warnings about how it reads its data, and about its model's mode
mode
other_optimizers, unfrozen, left_out     what is refused, and what ends the training
leaving                                  waiting for the ranks that are still in an epoch which this one has left, and
                                         handlers that keep a stop from the run
"""
