"""The errors netjac raises: few classes, each also the standard exception a caller would catch."""


class NetjacError(Exception):
    """Base of every error netjac raises on purpose."""


class ShapeError(NetjacError, ValueError):
    """An array has the wrong shape: the message states the shape expected, the shape given and what to do."""


class DtypeError(NetjacError, TypeError):
    """A data type that cannot be used here, such as integers where a derivative is asked for."""


class LayoutError(NetjacError, ValueError):
    """A layout pattern that is not an arrangement of the letters n, l and m."""


class NameLookupError(NetjacError, KeyError):
    """A parameter or output name that does not exist, or that fits several."""

    def __str__(self) -> str:  # KeyError would show the repr of the message, with its line breaks escaped
        return str(self.args[0]) if self.args else ""


class SampleIndexError(NetjacError, IndexError):
    """An index over the samples that there is no sample for; the message states how many there are."""


class PicklingError(NetjacError, TypeError):
    """An object that computes with a live network, which no pickle holds; the message states what to save instead."""


class ModelError(NetjacError, ValueError):
    """The model cannot be differentiated as given: not built, nothing to train, not traceable."""


class DataError(NetjacError, ValueError):
    """The data cannot be used: not finite, no samples where some are needed, or x and y that do not belong together."""


class SampleMixingError(NetjacError, ValueError):
    """One sample's output depends on another sample, so no Jacobian organised by sample exists."""


class RandomModelError(NetjacError, ValueError):
    """The model draws random numbers at every call, so its derivative is not a function of the parameters."""


class ProbeError(NetjacError, RuntimeError):
    """The factors disagree with the ordinary derivative; no matrix is returned."""


class DerivativeError(NetjacError, ValueError):
    """A derivative from outside that disagrees with a finite difference of its own value; the message shows both."""


class MemoryBudgetError(NetjacError, MemoryError):
    """A memory budget that not even one output of one sample fits; ``least`` is the number of bytes that would do."""

    def __init__(self, message: str, least: int = 0) -> None:
        super().__init__(message)
        self.least = least


class StoreError(NetjacError, OSError):
    """A Jacobian on disk that is missing, unfinished, damaged, in use, or belongs to something else."""


class WorkerError(NetjacError, RuntimeError):
    """An error on a worker of a cluster that is not netjac's own; the message states the samples, and what it was."""
