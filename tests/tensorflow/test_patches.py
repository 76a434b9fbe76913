"""Patches against windows taken pixel by pixel, and against TensorFlow's own convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from netjac.tensorflow.patches import convolution_patches, transposed_patches

CASES = [  # sizes, window, strides, dilations
    ((5,), (3,), (1,), (1,)),
    ((7,), (2,), (3,), (2,)),
    ((5, 6), (3, 2), (1, 1), (1, 1)),
    ((6, 5), (2, 3), (2, 1), (1, 1)),
    ((7, 6), (2, 2), (1, 1), (2, 3)),
    ((4, 5), (1, 1), (2, 3), (1, 1)),
    ((4, 5), (1, 1), (1, 1), (1, 1)),
    ((4, 3, 5), (2, 1, 3), (1, 1, 2), (1, 1, 1)),
    ((5, 3, 4), (2, 2, 2), (1, 1, 1), (2, 1, 1)),
    ((3, 3), (3, 3), (2, 2), (1, 1)),
]


def same_pads(sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> list:
    """TensorFlow's rule: ceil(size / stride) pixels out, the odd pixel of padding behind."""
    pads = []
    for size, w, s, d in zip(sizes, window, strides, dilations, strict=True):
        out = (size + s - 1) // s
        total = max((out - 1) * s + (w - 1) * d + 1 - size, 0)
        pads.append((total // 2, total - total // 2))
    return pads


def naive_patches(
    image: np.ndarray, window: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Any
) -> np.ndarray:
    """One number at a time: (n, *pixels out, taps, channels)."""
    n, *sizes, channels = image.shape
    counts = [(size + sum(p) - (w - 1) * d - 1) // s + 1
              for size, p, w, d, s in zip(sizes, pads, window, dilations, strides, strict=True)]  # fmt: skip
    taps = list(itertools.product(*map(range, window)))
    out = np.zeros((n, *counts, len(taps), channels))
    for i, pixel, (t, tap), c in itertools.product(
        range(n), itertools.product(*map(range, counts)), enumerate(taps), range(channels)
    ):
        at = [o * s + q * d - p[0] for o, s, q, d, p in zip(pixel, strides, tap, dilations, pads, strict=True)]
        if all(0 <= a < size for a, size in zip(at, sizes, strict=True)):
            out[(i, *pixel, t, c)] = image[(i, *at, c)]
    return out


def naive_transposed(
    image: np.ndarray, pixels: Sequence[int], window: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    front: Sequence[int],
) -> np.ndarray:  # fmt: skip
    """Each pixel in is scattered over the window: pixel i reaches pixel i·stride + q·dilation − pad through tap q."""
    n, *sizes, channels = image.shape
    taps = list(itertools.product(*map(range, window)))
    out = np.zeros((n, *pixels, len(taps), channels))
    for i, source, (t, tap) in itertools.product(range(n), itertools.product(*map(range, sizes)), enumerate(taps)):
        at = [a * s + q * d - f for a, s, q, d, f in zip(source, strides, tap, dilations, front, strict=True)]
        if all(0 <= a < size for a, size in zip(at, pixels, strict=True)):
            out[(i, *at, t)] += image[(i, *source)]
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("padding", ["VALID", "SAME", "explicit"])
def test_patches_equal_windows_taken_one_by_one(case: Any, padding: str, rng: np.random.Generator) -> None:
    sizes, window, strides, dilations = case
    image = rng.normal(size=(2, *sizes, 3))
    if padding == "VALID":
        pads, given = [(0, 0)] * len(sizes), "VALID"
    elif padding == "SAME":
        pads, given = same_pads(sizes, window, strides, dilations), "SAME"
    else:
        pads = given = [(1, 0), (0, 2), (2, 1)][: len(sizes)]
    patches = convolution_patches(tf.constant(image), window, strides, dilations, given)
    np.testing.assert_array_equal(patches, naive_patches(image, window, strides, dilations, pads))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("padding", ["VALID", "SAME", "explicit"])
def test_transposed_patches_equal_pixels_scattered_one_by_one(
    case: Any, padding: str, rng: np.random.Generator
) -> None:
    pixels, window, strides, dilations = case  # the sizes are now those that come out
    if padding == "VALID":
        pads, given = [(0, 0)] * len(pixels), "VALID"
    elif padding == "SAME":
        pads, given = same_pads(pixels, window, strides, dilations), "SAME"
    else:
        pads = given = [(1, 0), (0, 2), (2, 1)][: len(pixels)]
    sizes = [(o + sum(p) - (w - 1) * d - 1) // s + 1
             for o, p, w, d, s in zip(pixels, pads, window, dilations, strides, strict=True)]  # fmt: skip
    image = rng.normal(size=(2, *sizes, 3))
    patches = transposed_patches(tf.constant(image), pixels, window, strides, dilations, given)
    expected = naive_transposed(image, pixels, window, strides, dilations, [before for before, _ in pads])
    np.testing.assert_array_equal(patches, expected)


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(("strides", "dilations"), [((1, 1), (1, 1)), ((2, 3), (1, 1)), ((1, 1), (2, 3))])
def test_a_convolution_is_its_patches_times_its_kernel(padding: str, strides: Any, dilations: Any) -> None:
    rng = np.random.default_rng(1)
    image, kernel = rng.normal(size=(2, 8, 9, 3)), rng.normal(size=(3, 2, 3, 4))
    expected = tf.nn.conv2d(image, kernel, strides, padding, dilations=dilations)
    patches = convolution_patches(tf.constant(image), (3, 2), strides, dilations, padding)
    np.testing.assert_allclose(np.einsum("nxyqi,qic->nxyc", patches, kernel.reshape(6, 3, 4)), expected, atol=1e-12)


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_a_transposed_convolution_is_its_patches_times_its_kernel(padding: str, strides: Any) -> None:
    rng = np.random.default_rng(1)
    kernel, pixels = rng.normal(size=(3, 2, 4, 3)), (7, 8)
    shape = tf.nn.conv2d(np.zeros((1, *pixels, 4)), kernel, strides, padding).shape
    image = rng.normal(size=(2, *shape[1:3], 3))
    expected = tf.nn.conv2d_transpose(image, kernel, (2, *pixels, 4), strides, padding)
    patches = transposed_patches(tf.constant(image), pixels, (3, 2), strides, (1, 1), padding)
    np.testing.assert_allclose(np.einsum("nxyqi,qci->nxyc", patches, kernel.reshape(6, 4, 3)), expected, atol=1e-12)


def test_no_sample_and_an_unknown_number_of_samples() -> None:
    @tf.function(input_signature=[tf.TensorSpec((None, 5, 4, 2))])
    def patches(image: Any) -> Any:
        return convolution_patches(image, (2, 2), (2, 1), (1, 1), "SAME")

    assert patches(tf.zeros((0, 5, 4, 2))).shape == (0, 3, 4, 4, 2)
    assert patches(tf.zeros((3, 5, 4, 2))).shape == (3, 3, 4, 4, 2)
