"""Zarr, imported when it is first needed."""

from __future__ import annotations

from types import ModuleType


def files() -> ModuleType:
    """Return `netjac.store.files`.

    Raises
    ------
    ImportError
        Zarr is not installed, or is a version that knows no format 3.
    """
    try:
        import zarr
    except ModuleNotFoundError as error:
        if error.name != "zarr":  # it is there, and something it needs is not
            raise
        raise ImportError(
            'a Jacobian on disk is a Zarr store, and Zarr is not installed: pip install "netjac[zarr]".'
        ) from error
    if int(zarr.__version__.partition(".")[0]) < 3:
        raise ImportError(
            f'a Jacobian on disk needs Zarr 3, and zarr {zarr.__version__} is installed: pip install "netjac[zarr]".'
        )
    import netjac.store.files

    return netjac.store.files
