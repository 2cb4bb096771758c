"""An example plug-in. Importing the package registers its components with vitfleet."""

from vitfleet_example.fedexp import FedExP
from vitfleet_example.kappa import kappa
from vitfleet_example.shapes import shapes
from vitfleet_example.unequal import unequal

__all__ = ["FedExP", "kappa", "shapes", "unequal"]
