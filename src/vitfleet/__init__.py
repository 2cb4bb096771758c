"""vitfleet trains vision transformers across a fleet of edge devices.

Importing the package is cheap: torch is imported by the rooms that compute, not here.
"""

__version__ = "0.1.0"
