"""One module a framework, imported only in the worker that needs it.

Each gives ``CONTENDERS``, name → function from `FitTask` to `PreparedFit`, and ``PACKAGES``, whose versions are shown.
"""
