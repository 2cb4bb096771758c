"""Griffe extension: turns roles such as ``:class:`~vitfleet.message.Message``` in docstrings into links.

A name is looked up from the place where the docstring stands, so a role that names nothing fails a strict build.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(?P<short>~?)(?P<target>[\w.]+)`")


LOG = logging.getLogger("mkdocs.plugins.docs_roles")  # warnings of this logger fail a strict build


class Roles(griffe.Extension):
    """Rewrites the roles of every docstring once a package is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Visit every object of the package."""
        _rewrite(pkg)


def _rewrite(found: griffe.Object) -> None:
    if found.docstring is not None:
        found.docstring.value = ROLE.sub(lambda role: _link(role, found), found.docstring.value)
    for member in found.members.values():
        if isinstance(member, griffe.Object):
            _rewrite(member)


def _link(role: re.Match[str], scope: griffe.Object) -> str:
    target = role["target"]
    first, *rest = target.split(".")
    shown = target.rsplit(".", 1)[-1] if role["short"] else target
    if first == "vitfleet":
        return f"[`{shown}`][{target}]"
    if first.startswith("_"):  # private: not in the reference
        return f"`{shown}`"
    try:
        return f"[`{shown}`][{'.'.join([scope.resolve(first), *rest])}]"
    except griffe.NameResolutionError:
        LOG.warning("%s: its docstring refers to %s, which does not exist there", scope.path, target)
        return f"`{shown}`"
