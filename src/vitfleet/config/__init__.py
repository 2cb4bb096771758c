"""What a run is: typed, validated, from TOML presets, files and overrides. Imports no torch."""

from vitfleet.config.load import load_config, presets, read_config
from vitfleet.config.schema import Config

__all__ = ["Config", "load_config", "presets", "read_config"]
