"""One file, one algorithm; each reads beside its paper. Importing the package registers the built-in methods."""

# In the order in which `vitfleet keys`, `vitfleet cost` and the documentation list them.
from vitfleet.methods.personal.standalone import Standalone  # isort: skip
from vitfleet.methods.averaging.fedavg import FedAvg, WeightAveraging  # isort: skip
from vitfleet.methods.averaging.fedprox import FedProx  # isort: skip
from vitfleet.methods.personal.apfl import Apfl  # isort: skip
from vitfleet.methods.averaging.transfl import TransFL  # isort: skip
from vitfleet.methods.tuning.peft import FedBias, FedFull, FedHead, FedLora, FedPrompt  # isort: skip
from vitfleet.methods.tuning.fedbfpt import FedBfpt  # isort: skip
from vitfleet.methods.split.eftvit import EftVit  # isort: skip
from vitfleet.methods.personal.fedper import FedPer  # isort: skip
from vitfleet.methods.personal.fedrep import FedRep  # isort: skip
from vitfleet.methods.continual.gradients.gem import AGem, Gem  # isort: skip
from vitfleet.methods.continual.penalties.ewc import Ewc  # isort: skip
from vitfleet.methods.continual.penalties.mas import Mas  # isort: skip
from vitfleet.methods.continual.fedweit import FedWeit  # isort: skip
from vitfleet.methods.continual.gradients.fedvit import FedVit  # isort: skip
from vitfleet.methods.continual.gradients.fedknow import FedKnow  # isort: skip
from vitfleet.methods.continual.replay.experience_replay import DerPlusPlus, ExperienceReplay  # isort: skip
from vitfleet.methods.continual.replay.dytox import DyTox  # isort: skip
from vitfleet.methods.continual.replay.bcn import Bcn  # isort: skip
from vitfleet.methods.continual.replay.lvt import Lvt  # isort: skip
from vitfleet.methods.continual.joint import Joint  # isort: skip
from vitfleet.methods.reported import ClientMetric, reduce_client_metrics  # isort: skip
from vitfleet.methods.base import (  # isort: skip
    Aggregator,
    ClientGenerator,
    ClientRoundInput,
    ClientUpdate,
    Method,
    MethodContext,
    Work,
    adapt_model,
    declared_work,
    make_method,
    method_class,
)

__all__ = [
    "AGem",
    "Aggregator",
    "Apfl",
    "Bcn",
    "ClientGenerator",
    "ClientMetric",
    "ClientRoundInput",
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
    "Work",
    "adapt_model",
    "declared_work",
    "make_method",
    "method_class",
    "reduce_client_metrics",
]
