"""Jacobians on disk: written tile by tile into a Zarr store, resumed after any interruption, and lazily read.

A store is written next to its final place, in ``<path>.partial``, and renamed when it is whole: what stands at
``<path>`` is complete, whoever reads it. Only `files` imports Zarr, when it is first needed.
"""

from netjac.store.reading import StoredJacobian, open
from netjac.store.writing import save

__all__ = ["StoredJacobian", "open", "save"]
