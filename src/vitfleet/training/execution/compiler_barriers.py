"""Barriers that torch's compiler leaves out of the kernels that it writes for a GPU.

A kernel that loops over an axis may store a tensor in one loop and read it back in the next. The compiler puts no
barrier in between, and in the second loop an element may belong to another warp: that warp then may read what was in
the memory before. Nothing reports it (https://github.com/pytorch/pytorch/issues/190517; seen in torch 2.11 and 2.13).
The compiled backward pass of stacked blocks has such a kernel, the gradient of a layer norm, and captured steps share
their memory: what was there before may be of another step. Upstream the same was proposed in pull request 190519.

A tensor that is read in one loop and written in the next one, in place, gets no barrier here.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

BARRIER = "tl.debug_barrier()"
WAITED_FOR = "vitfleet_waited_for"  # attribute of a kernel: what was stored before its last barrier
# Part of the key under which compiled code is cached on disk: code without the barriers must not be found there.
CACHE_TAG = "vitfleet-barriers"


def add_compiler_barriers() -> None:
    """Let kernels that are compiled from now on wait between storing a tensor and reading it back.

    The barrier is between the loops, not in one of them. One is enough for all that was stored before it.
    """
    # Imported here, as it takes more than a second.
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.select_algorithm import TritonTemplateKernel

    load = TritonKernel.load
    if getattr(load, "has_barriers", False):
        return

    @wraps(load)
    def load_after_barrier(kernel: Any, name: str, index: Any) -> Any:
        # What was stored in loops that have ended. Their code is in the body already, that of this loop is not. (The
        # body of a template is a part of its own code: nothing may be put there.)
        stored = set(kernel.cse.invalidated_stores)
        if name in stored - vars(kernel).get(WAITED_FOR, set()) and not isinstance(kernel, TritonTemplateKernel):
            kernel.body.writeline(BARRIER)
            setattr(kernel, WAITED_FOR, stored)
        return load(kernel, name, index)

    setattr(load_after_barrier, "has_barriers", True)  # noqa: B010
    setattr(TritonKernel, "load", load_after_barrier)  # noqa: B010
    _separate_cache()


def _separate_cache() -> None:
    """Keep compiled code with barriers apart from code without them, on disk."""
    settings: Any = torch.compiler.config
    if hasattr(settings, "cache_key_tag"):
        settings.cache_key_tag += CACHE_TAG
    else:  # older versions of torch have no such setting
        torch._inductor.config.fx_graph_cache = False
