"""The state of a training run as a checkpoint contains it, and checks that it is complete.

training, stateful, counts        all of it: model, optimizer, scaler, average, task, and how far training is
optimizer, groups, plain          what optimizers hold, also outside their state
model, modes, hidden_buffers      what modules hold: tensors, modes, and buffers that state_dict() omits
packing, stored                   values as JSON and named tensors, and what may be loaded
selfcheck, undoing, comparing     whether it comes back, tried once without touching what trains
watching, attributes, snapshot, contents, lookup, claims   what training changes and no checkpoint contains
coming_back, left_gradients, holders   of that, what loading gives back, and gradients that a step leaves to the next
held, surroundings, kinds, places   where that may be, and what single values there tell
inner_parts, comm_hooks             what an object is made of; what DDP's communication hooks keep
only_written, position_tables, set_before_read, unread   what cannot matter to a resume, although it changes
syntax, liveness   read the source, for these two and for own/watch/
"""
