"""Methods that project a step's gradient: none has an obtuse angle with the gradients of earlier tasks.

What gives an earlier task's gradient, stored samples or a sparse model of it, is the method's.
"""
