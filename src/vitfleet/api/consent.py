"""What runs will take, before the Python API starts them: it is logged, and what is too much is refused."""

from __future__ import annotations

import logging
from pathlib import Path

from vitfleet.costs.estimate import RunEstimate, available
from vitfleet.errors import UserError
from vitfleet.report.console.costs import estimate_line, too_much

log = logging.getLogger(__name__)


def check_estimate(estimate: RunEstimate | None, folder: Path, force: bool) -> None:
    """Log what runs will take, and refuse those that would take days or do not fit.

    Nothing is printed: a program that wants the estimate shown sets the level of the logger ``vitfleet`` to INFO.

    Parameters
    ----------
    estimate
        ``None`` if it is not known.
    folder
        Where the runs are stored.
    force
        Whether they are started anyway.

    Raises
    ------
    UserError
        They take too much, and ``force`` is not set.
    """
    if estimate is None:
        return
    log.info("estimated: %s", estimate_line(estimate))
    if estimate.remark:
        log.warning("%s", estimate.remark)
    problem = too_much(estimate, available(estimate.device, folder))
    if problem is None:
        return
    if not force:
        raise UserError(f"not started: {problem}; make it smaller, or start it with force=True")
    log.warning("started with force=True: %s", problem)
