"""A progress bar, where one is wanted and somebody can see it."""

from __future__ import annotations

from typing import Any


def bar(total: int, unit: str, shown: bool) -> Any:
    """tqdm's, silent where standard error is no terminal."""
    if not shown:
        return _Silent()
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ImportError('a progress bar needs tqdm: pip install "netjac[progress]".') from error
    return tqdm(total=total, unit=f" {unit}", disable=None)


class _Silent:
    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: int) -> None:
        """Nothing to see."""
