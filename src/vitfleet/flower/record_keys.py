"""Names used in Flower messages. This module imports nothing, because every message starts a new process."""

HEADER = "header"  # the record of everything except tensors
CHUNK = "chunk"  # the only field of a record that holds a part of a vitfleet message
CLIENT_NAME = "client_name"  # the action of the query for a client's name, and the field of its reply
