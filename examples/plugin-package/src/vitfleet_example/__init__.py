"""An example plug-in. Importing the package registers its components with vitfleet."""

from vitfleet_example.fedavgm import FedAvgM
from vitfleet_example.kappa import kappa
from vitfleet_example.shapes import shapes
from vitfleet_example.unequal import unequal

__all__ = ["FedAvgM", "kappa", "shapes", "unequal"]
