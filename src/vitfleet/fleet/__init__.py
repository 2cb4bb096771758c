"""Fleets: where clients run, and how messages reach them.

Here are requests and replies, a client's round, and the fleets that run in one process or in several on one machine.
Fleets on machines of their own are in ``flower``; what a client computes is in ``methods``.
"""
