"""One file, one algorithm; each reads beside its paper."""

from vitfleet.methods.base import Answer, Gathering, Job, Method, Setting, Work
from vitfleet.methods.registry import adapt, make_method

__all__ = ["Answer", "Gathering", "Job", "Method", "Setting", "Work", "adapt", "make_method"]
