"""Fits of a network by optimisers from outside, SciPy's first. Imports no TensorFlow."""

from netjac.optimize.monitor import History
from netjac.optimize.options import OptionError
from netjac.optimize.problem import LeastSquares

__all__ = ["LeastSquares", "History", "OptionError"]
