"""One file, one algorithm; each reads beside its paper. Importing the package registers the built-in methods."""

# isort: off
# In the order in which `vitfleet keys`, `vitfleet cost` and the documentation list them.
from vitfleet.methods.personal import standalone  # noqa: F401
from vitfleet.methods.averaging import fedavg, fedprox  # noqa: F401
from vitfleet.methods.personal import apfl  # noqa: F401
from vitfleet.methods.averaging import transfl  # noqa: F401
from vitfleet.methods.tuning import peft, fedbfpt  # noqa: F401
from vitfleet.methods.split import eftvit  # noqa: F401
from vitfleet.methods.closed_form import closed_form  # noqa: F401
from vitfleet.methods.personal import fedper, fedrep  # noqa: F401
from vitfleet.methods.continual.gradients import gem  # noqa: F401
from vitfleet.methods.continual.penalties import ewc, mas  # noqa: F401
from vitfleet.methods.continual import fedweit  # noqa: F401
from vitfleet.methods.continual.gradients import fedvit, fedknow  # noqa: F401
from vitfleet.methods.continual.replay import experience_replay, dytox, bcn, lvt  # noqa: F401
from vitfleet.methods.continual import analytic, joint  # noqa: F401

# isort: on
from vitfleet.methods.base import (
    Aggregator,
    ClientGenerator,
    ClientRoundInput,
    ClientUpdate,
    Method,
    MethodContext,
    Work,
    adapt_model,
    declared_work,
    frozen_part,
    head_features,
    make_head_solver,
    make_method,
    method_class,
    model_adaptation,
)
from vitfleet.methods.reported import ClientMetric, reduce_client_metrics

__all__ = [
    "Aggregator",
    "ClientGenerator",
    "ClientMetric",
    "ClientRoundInput",
    "ClientUpdate",
    "Method",
    "MethodContext",
    "Work",
    "adapt_model",
    "declared_work",
    "frozen_part",
    "head_features",
    "make_head_solver",
    "make_method",
    "method_class",
    "model_adaptation",
    "reduce_client_metrics",
]
