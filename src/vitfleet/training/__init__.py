"""How a training step is written and run: the step's view, the trainings that methods ask for, the trainer.

Nothing here knows a method: what a method's step computes lives with the method. `stacking/` makes several clients one
set of tensors, `capture/` runs their steps eagerly or from CUDA graphs, `optimizers/` changes weights, `execution/` is
the device with its precision and memory.
"""
