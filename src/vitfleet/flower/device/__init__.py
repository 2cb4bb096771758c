"""A client on its own machine.

``supernode`` is the process that keeps it connected. For each message Flower starts ``client_app``, which passes it to
the ``worker``; there ``handler`` asks the ``client``, which checks the owner's ``limits``, uses its ``storage``, and
reports to the owner (``activity``). ``trim`` makes an installation smaller.
"""
