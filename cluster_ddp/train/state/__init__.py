"""The state of a training run as a checkpoint contains it, and checks that it is complete.

training                          all of it: model, optimizer, scaler, average, task
optimizer, groups, plain          what optimizers hold, also outside their state
modes, hidden_buffers             what else modules hold: modes, and buffers that state_dict() omits
packing, stored                   values as JSON and named tensors, and what may be loaded
selfcheck, undoing, comparing     whether it comes back, tried once without touching what trains
attributes, contents, only_written, surroundings   what training changes and no checkpoint contains
"""
