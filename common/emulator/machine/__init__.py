"""The machine: memory, thread blocks, asynchronous operations and the scheduler of a launch."""
