"""One file, one algorithm; each reads beside its paper. Importing the package registers the built-in methods."""

# In the order in which `vitfleet keys`, `vitfleet cost` and the documentation list them.
from vitfleet.methods.standalone import Standalone  # isort: skip
from vitfleet.methods.fedavg import FedAvg, WeightAveraging  # isort: skip
from vitfleet.methods.fedprox import FedProx  # isort: skip
from vitfleet.methods.apfl import Apfl  # isort: skip
from vitfleet.methods.transfl import TransFL  # isort: skip
from vitfleet.methods.peft import FedBias, FedFull, FedHead, FedLora, FedPrompt  # isort: skip
from vitfleet.methods.fedbfpt import FedBfpt  # isort: skip
from vitfleet.methods.eftvit import EftVit  # isort: skip
from vitfleet.methods.fedper import FedPer  # isort: skip
from vitfleet.methods.fedrep import FedRep  # isort: skip
from vitfleet.methods.gem import AGem, Gem  # isort: skip
from vitfleet.methods.ewc import Ewc  # isort: skip
from vitfleet.methods.mas import Mas  # isort: skip
from vitfleet.methods.fedweit import FedWeit  # isort: skip
from vitfleet.methods.fedvit import FedVit  # isort: skip
from vitfleet.methods.fedknow import FedKnow  # isort: skip
from vitfleet.methods.er import ExperienceReplay  # isort: skip
from vitfleet.methods.derpp import DerPlusPlus  # isort: skip
from vitfleet.methods.dytox import DyTox  # isort: skip
from vitfleet.methods.bcn import Bcn  # isort: skip
from vitfleet.methods.lvt import Lvt  # isort: skip
from vitfleet.methods.joint import Joint  # isort: skip
from vitfleet.methods.client_metrics import ClientMetric, reduce_client_metrics  # isort: skip
from vitfleet.methods.context import MethodContext  # isort: skip
from vitfleet.methods.base import (  # isort: skip
    Aggregator,
    ClientGenerator,
    ClientJob,
    ClientUpdate,
    Method,
    adapt_model,
    make_method,
    method_class,
)

__all__ = [
    "AGem",
    "Aggregator",
    "Apfl",
    "Bcn",
    "ClientGenerator",
    "ClientJob",
    "ClientMetric",
    "ClientUpdate",
    "DerPlusPlus",
    "DyTox",
    "EftVit",
    "Ewc",
    "ExperienceReplay",
    "FedAvg",
    "FedBfpt",
    "FedBias",
    "FedFull",
    "FedHead",
    "FedKnow",
    "FedLora",
    "FedPer",
    "FedPrompt",
    "FedProx",
    "FedRep",
    "FedVit",
    "FedWeit",
    "Gem",
    "Joint",
    "Lvt",
    "Mas",
    "Method",
    "MethodContext",
    "Standalone",
    "TransFL",
    "WeightAveraging",
    "adapt_model",
    "make_method",
    "method_class",
    "reduce_client_metrics",
]
