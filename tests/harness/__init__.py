"""Runs plain functions on N gloo ranks.

* ``@ranks(2)``: the test's body runs on two ranks, like a plain function.
* ``run_ranks(function, 2, *args)``: the results of a module-level function, one per rank.
* ``collect_outcomes(function, 2, *args)``: the same for ranks that may raise or die; nothing is raised.
"""

from tests.harness.decorator import ranks
from tests.harness.launch import RankError, RankOutcome, collect_outcomes, run_ranks

__all__ = ["RankError", "RankOutcome", "collect_outcomes", "ranks", "run_ranks"]
