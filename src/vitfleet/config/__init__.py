"""What a run is: typed, validated, from TOML presets, files and overrides. Imports no torch."""

from vitfleet.config.load import load_config, presets, read_config
from vitfleet.config.methods import FedAvgConfig, FedProxConfig, MethodConfig, StandaloneConfig
from vitfleet.config.schema import (
    AugmentConfig,
    Config,
    DataConfig,
    EvalConfig,
    FleetConfig,
    MachineConfig,
    ModelConfig,
    PartitionConfig,
    TrainConfig,
)

__all__ = [
    "AugmentConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "FedAvgConfig",
    "FedProxConfig",
    "FleetConfig",
    "MachineConfig",
    "MethodConfig",
    "ModelConfig",
    "PartitionConfig",
    "StandaloneConfig",
    "TrainConfig",
    "load_config",
    "presets",
    "read_config",
]
