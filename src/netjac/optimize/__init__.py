"""Fits of a network by optimisers from outside, SciPy's first. Imports no TensorFlow."""

from netjac.optimize.checkpoint import CheckpointNotFoundError
from netjac.optimize.constraints import OutputConstraint
from netjac.optimize.monitor import History
from netjac.optimize.objective import Objective
from netjac.optimize.options import OptionError
from netjac.optimize.problem import LeastSquares
from netjac.optimize.solvers import least_squares

__all__ = [
    "LeastSquares",
    "Objective",
    "OutputConstraint",
    "least_squares",
    "History",
    "OptionError",
    "CheckpointNotFoundError",
]
