"""The state of a training run as a checkpoint contains it, and checks that it is complete.

training, stateful, counts               all of it: model, optimizer, scaler, average, task, how far training is
optimizer, groups                        what optimizers hold
model, modes, hidden_buffers             what modules hold: tensors, modes, and buffers that state_dict() omits
stored                                   what may be loaded
selfcheck, undoing                       whether it comes back, tried once without touching what trains
watching, lookup, claims                 what training changes and no checkpoint contains
coming_back, left_gradients, holders     of that, what loading gives back, and gradients that a step leaves to the next
position_tables, set_before_read, unread what cannot matter to a resume, although it changes
"""
