"""`tf.vectorized_map`, apart from one product that TensorFlow's oneDNN kernels get wrong.

In single precision with oneDNN on, as TensorFlow comes (2.21), a batched product of shapes (q, 1, a, k) and (1, k, c)
gives wrong numbers for some sizes and writes outside its memory. Vectorising puts q in front of what it goes over, so a
single sample is all it takes. With one axis of length 1 more, (q, 1, 1, a, k), the product is right.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

PRODUCT = "BatchMatMulV2"
_CONVERTERS = threading.RLock()  # TensorFlow keeps one table of how operations are vectorised


def vectorized_map(function: Callable[[Any], Any], items: Any) -> Any:
    """As ``tf.vectorized_map``: ``function`` of every item, stacked; its errors are TensorFlow's.

    What TensorFlow logs of them beside, hundreds of lines, is left out: whoever calls has another way, or says more.
    """
    with _wide_products(), _without_its_log():
        return tf.vectorized_map(function, items)


@contextmanager
def _without_its_log() -> Iterator[None]:
    logger = tf.get_logger()
    logger.addFilter(_not_of_the_vectoriser)
    try:
        yield
    finally:
        logger.removeFilter(_not_of_the_vectoriser)


def _not_of_the_vectoriser(record: logging.LogRecord) -> bool:
    return record.filename != "pfor.py"


@contextmanager
def _wide_products() -> Iterator[None]:
    with _CONVERTERS:
        table = pfor._pfor_converter_registry
        before = table[PRODUCT]
        table[PRODUCT] = _wide_product
        try:
            yield
        finally:
            table[PRODUCT] = before


def _wide_product(operation: Any) -> Any:
    """x (q, n, a, k) times y (n or 1, k, c), or the like of any rank; q stacks what is vectorised."""
    operation.expanddim_inputs_for_broadcast()
    (x, stacked, _), (y, both, _) = operation.input(0), operation.input(1)
    widened = stacked and not both and x.shape.rank == 4
    if widened:
        x = tf.expand_dims(x, 1)
    product = tf.matmul(x, y, adjoint_a=operation.get_attr("adj_x"), adjoint_b=operation.get_attr("adj_y"))
    return pfor.wrap(tf.squeeze(product, 1) if widened else product, True)
