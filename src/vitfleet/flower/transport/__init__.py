"""What a server and its clients send each other: ``payloads``, their ``codec``, and one of Flower's ``messages``."""
