"""The windows a convolution sees, as an array: what comes in at each pixel that goes out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, Literal

import tensorflow as tf

Padding = Literal["SAME", "VALID"] | Sequence[tuple[int, int]]


def convolution_patches(
    image: Any, window: Sequence[int], strides: Sequence[int], dilations: Sequence[int], padding: Padding
) -> Any:
    """Patches (n, *pixels out, taps, channels) of ``image`` (n, *pixels, channels), taps in C order of the window."""
    sizes = [int(s) for s in image.shape[1:-1]]
    spans = [(w - 1) * d + 1 for w, d in zip(window, dilations, strict=True)]
    if padding == "VALID":
        pads = [(0, 0)] * len(sizes)
    elif padding == "SAME":
        totals = [max((-(-n // s) - 1) * s + span - n, 0) for n, s, span in zip(sizes, strides, spans, strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        pads = [(int(before), int(after)) for before, after in padding]
    counts = [(n + sum(p) - span) // s + 1 for n, p, span, s in zip(sizes, pads, spans, strides, strict=True)]
    return _windows(image, pads, counts, window, strides, dilations)


def transposed_patches(
    image: Any,
    pixels_out: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    padding: Padding,
) -> Any:
    """Patches (n, *pixels out, taps, channels) such that a transposed convolution is their product with its kernel.

    The image is spread by the strides (zeros between its pixels). Pixel o out then sees, through tap q, the spread
    pixel o + pad − q·dilation, where pad is what the corresponding forward convolution pads in front.
    """
    sizes = [int(s) for s in image.shape[1:-1]]
    spans = [(w - 1) * d + 1 for w, d in zip(window, dilations, strict=True)]
    if padding == "VALID":
        front = [0] * len(sizes)
    elif padding == "SAME":
        front = [max((n - 1) * s + span - out, 0) // 2
                 for n, s, span, out in zip(sizes, strides, spans, pixels_out, strict=True)]  # fmt: skip
    else:
        front = [int(before) for before, _ in padding]
    spread = image
    for axis, (size, stride) in enumerate(zip(sizes, strides, strict=True), start=1):
        spread = _spread(spread, axis, size, stride)
    lengths = [(n - 1) * s + 1 for n, s in zip(sizes, strides, strict=True)]
    before = [span - 1 - pad for span, pad in zip(spans, front, strict=True)]
    if min(before) < 0:  # padded by more than the window reaches: the pixels in front are never seen
        skipped = [max(-b, 0) for b in before]
        spread = spread[(slice(None), *(slice(s, None) for s in skipped))]
        lengths = [max(length - s, 0) for length, s in zip(lengths, skipped, strict=True)]
        before = [max(b, 0) for b in before]
    after = [out + span - 1 - b - length
             for out, span, b, length in zip(pixels_out, spans, before, lengths, strict=True)]  # fmt: skip
    pads = [(b, max(a, 0)) for b, a in zip(before, after, strict=True)]
    ones = [1] * len(sizes)
    patches = _windows(spread, pads, list(pixels_out), window, ones, dilations)
    return tf.reverse(patches, axis=[len(sizes) + 1])  # the window slides the other way over the kernel


def _spread(image: Any, axis: int, size: int, stride: int) -> Any:
    """Put stride − 1 zeros between neighbours along an axis."""
    if stride == 1:
        return image
    rank = len(image.shape)
    wide = tf.pad(
        tf.expand_dims(image, axis + 1), [[0, 0]] * (axis + 1) + [[0, stride - 1]] + [[0, 0]] * (rank - axis - 1)
    )
    shape = [-1 if d is None else int(d) for d in image.shape]
    shape[axis] = size * stride
    merged = tf.reshape(wide, shape)
    return merged[tuple([slice(None)] * axis + [slice(0, (size - 1) * stride + 1)])]


def _windows(
    image: Any,
    pads: Sequence[tuple[int, int]],
    counts: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Any:
    channels = int(image.shape[-1])
    if any(before or after for before, after in pads):
        image = tf.pad(image, [[0, 0], *map(list, pads), [0, 0]])
    if prod(window) == 1:
        return tf.expand_dims(image[_strided([0] * len(counts), counts, strides)], -2)
    if len(counts) == 2 and min(counts) > 0:
        flat = tf.image.extract_patches(
            image[:, : (counts[0] - 1) * strides[0] + (window[0] - 1) * dilations[0] + 1,
                  : (counts[1] - 1) * strides[1] + (window[1] - 1) * dilations[1] + 1],
            [1, *window, 1], [1, *strides, 1], [1, *dilations, 1], "VALID",
        )  # fmt: skip
        return tf.reshape(flat, [-1, *counts, prod(window), channels])
    starts = product(*(range(0, w * d, d) for w, d in zip(window, dilations, strict=True)))
    return tf.stack([image[_strided(start, counts, strides)] for start in starts], axis=-2)


def _strided(start: Sequence[int], counts: Sequence[int], strides: Sequence[int]) -> tuple[slice, ...]:
    slices = (slice(b, b + (c - 1) * s + 1 if c else b, s) for b, c, s in zip(start, counts, strides, strict=True))
    return (slice(None), *slices)
