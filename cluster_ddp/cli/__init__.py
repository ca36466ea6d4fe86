"""The command line: one module per command, each imported only when it is called.

app                                finds a command's module and runs it; its `COMMANDS` lists them
submit, local, launch, resume      starting runs
stop, cancel                       ending them
status, list, logs                 looking at them
checkpoints, export, clean         what they have saved
rehearse                           does a program resume exactly?
init, templates                    first job files
sweep, sweep_start, sweep_end      many runs at once
options, output, table, screen     what several commands use: arguments, and printing
selection, overview, run_states, best   the runs they are about
"""
