"""Linear heads in closed form, from sums over clients.

``sums`` are what clients send and the server adds, ``solvers`` turn them into a head, ``closed_form`` is the method.
What a head sees is :mod:`vitfleet.models.variants.wide_head`.
"""
