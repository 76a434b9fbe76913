"""One module a framework, imported only in the worker that needs it.

Each gives ``CONTENDERS``, name → function from `Task` to `Prepared`, and ``PACKAGES``, whose versions are reported.
"""
