"""What a run is, before anything is computed: tables of keys, from presets, files and overrides. Imports no torch.

Here are the tables that every run has (``schema`` and what it imports), the registries of methods, models, data sets
and others, which bring their own tables, and the reading and checking of what users write. The components themselves
are elsewhere.
"""

from vitfleet.config.load import load_config, presets, read_config
from vitfleet.config.schema import Config

__all__ = ["Config", "load_config", "presets", "read_config"]
