"""What a server does with the weights that clients send: checks, rules, means, and its own optimiser.

What clients compute does not live here, and no rule knows a method.
"""
