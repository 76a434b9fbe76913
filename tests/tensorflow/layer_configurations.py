"""Every Keras layer with trainable weights, in the configurations that change how its weights are used.

``CONFIGURATIONS[layer][label]`` builds (model, x). In each model the layer's own variables are the only trainable ones:
what follows it is a frozen head with two outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

L = keras.layers
Build = Callable[[], tuple[Any, Any]]
CONFIGURATIONS: dict[str, dict[str, Build]] = {}

# Layers of keras.layers without a configuration, and why.
ABSTRACT = {
    "Layer": "the base class",
    "Wrapper": "the base class of wrappers",
    "InputLayer": "a placeholder",
    "Lambda": "a function: its weights are another layer's",
    "JaxLayer": "runs JAX, which has no TensorFlow graph",
    "FlaxLayer": "runs JAX, which has no TensorFlow graph",
    "TorchModuleWrapper": "runs PyTorch, which has no TensorFlow graph",
    "TFSMLayer": "runs a SavedModel; loaded ones are tested as models",
}
_WITHOUT_WEIGHTS = """
    Activation ActivityRegularization Add AlphaDropout Average Concatenate Cropping1D Cropping2D Cropping3D Dot Dropout
    ELU Flatten GaussianDropout GaussianNoise Identity LeakyReLU Masking Maximum Minimum Multiply Permute ReLU
    RepeatVector Rescaling Reshape Resizing Softmax SpatialDropout1D SpatialDropout2D SpatialDropout3D Subtract
    UnitNormalization UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D
    AdaptiveAveragePooling1D AdaptiveAveragePooling2D AdaptiveAveragePooling3D
    AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D
    AveragePooling1D AveragePooling2D AveragePooling3D MaxPooling1D MaxPooling2D MaxPooling3D
    GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D
    GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D
    CategoryEncoding CenterCrop Discretization HashedCrossing Hashing IntegerLookup MelSpectrogram Normalization
    StringLookup TextVectorization MaxNumBoundingBoxes
    AugMix AutoContrast ContrastLimitedAdaptiveHistogramEqualization CutMix Equalization MixUp RandAugment
    RandomBrightness RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop RandomElasticTransform
    RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale RandomHue RandomInvert RandomPerspective
    RandomPosterization RandomRotation RandomSaturation RandomSharpness RandomShear RandomTranslation RandomZoom
    Solarization
    """
WITHOUT_WEIGHTS = frozenset(_WITHOUT_WEIGHTS.split())


def layer_classes(module: Any = L) -> dict[type, list[str]]:
    """The layer classes a module exports, each with its names: its own first, then aliases."""
    found: dict[type, list[str]] = {}
    for name in sorted(dir(module)):
        value = getattr(module, name)
        if inspect.isclass(value) and issubclass(value, keras.layers.Layer):
            found.setdefault(value, []).append(name)
    return {c: sorted(names, key=lambda name: name != c.__name__) for c, names in found.items()}


def unconfigured(classes: dict[type, list[str]]) -> list[str]:
    """Classes under none of whose names there is a configuration or a reason for having none."""
    known = {*CONFIGURATIONS, *ABSTRACT, *WITHOUT_WEIGHTS}
    return [names[0] for names in classes.values() if not known.intersection(names)]


def present() -> dict[str, dict[str, Build]]:
    """The configurations of the layers that the installed Keras has."""
    return {layer: labels for layer, labels in CONFIGURATIONS.items() if hasattr(L, layer)}


@contextmanager
def built_in(dtype: str) -> Iterator[None]:
    """The type Keras builds layers in."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def data(*shape: int, n: int = 2, seed: int = 7) -> np.ndarray:
    """Inputs of n samples, away from zero."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(0.2, 1.0, (n, *shape)) * rng.choice([-1.0, 1.0], (n, *shape))
    return values.astype(keras.config.floatx())


def tokens(length: int, size: int, n: int = 2) -> np.ndarray:
    return np.random.default_rng(7).integers(0, size, (n, length)).astype("int32")


def head(h: Any, l: int = 2) -> Any:
    """A frozen end with l outputs, that makes every cotangent of ``h`` (one or several tensors) another."""
    parts = [
        L.Flatten()(part) if len(part.shape) > 2 else part for part in (h if isinstance(h, (list, tuple)) else [h])
    ]
    joined = parts[0] if len(parts) == 1 else L.Concatenate()(parts)
    return L.Dense(l, trainable=False)(L.Activation("tanh")(joined))


def around(call: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[Any, Any]:
    """input(s) → ``call`` → head, with data of these shapes."""
    inputs = [keras.Input(shape) for shape in shapes]
    model = keras.Model(inputs[0] if len(inputs) == 1 else inputs, head(call(*inputs)))
    x = [data(*shape, seed=7 + i) for i, shape in enumerate(shapes)]
    return model, x[0] if len(x) == 1 else x


def of_tokens(call: Callable[..., Any], length: int, size: int) -> tuple[Any, Any]:
    """The same for token numbers."""
    i = keras.Input((length,), dtype="int32")
    return keras.Model(i, head(call(i))), tokens(length, size)


def takes(layer: str, *arguments: str) -> bool:
    """Whether the installed Keras has the layer, with these arguments."""
    return hasattr(L, layer) and all(a in inspect.signature(getattr(L, layer).__init__).parameters for a in arguments)


def configure(layer: str, label: str, build: Build) -> None:
    assert label not in CONFIGURATIONS.setdefault(layer, {}), f"{layer} {label} stands twice"
    CONFIGURATIONS[layer][label] = build


def simple(layer: str, shape: tuple[int, ...], *args: Any, **options: dict[str, Any]) -> None:
    """Configurations that differ in keyword arguments alone: label → arguments."""
    for label, kwargs in options.items():

        def build(kwargs: dict[str, Any] = kwargs) -> tuple[Any, Any]:
            return around(getattr(L, layer)(*args, **kwargs), shape)

        configure(layer, label.replace("_", " "), build)


# Dense --------------------------------------------------------------------------------------------------------------

simple("Dense", (4,), 5, bias={}, no_bias={"use_bias": False}, activation={"activation": "gelu"})
simple("Dense", (3, 4), 5, on_sequences={}, on_sequences_without_bias={"use_bias": False})
simple("Dense", (2, 3, 4), 5, on_grids={})
simple(
    "EinsumDense",
    (4, 5),
    "btd,de->bte",
    (4, 3),
    bias={"bias_axes": "e"},
    no_bias={},
    bias_a_position={"bias_axes": "te"},
)
simple("EinsumDense", (4, 5), "btd,dhk->bthk", (4, 2, 3), into_heads={"bias_axes": "hk"})
simple("EinsumDense", (4, 2, 3), "bthk,hkd->btd", (4, 5), out_of_heads={"bias_axes": "d"})
simple("EinsumDense", (4, 2, 3), "bthk,hkd->bthd", (4, 2, 5), heads_apart={"bias_axes": "hd"})
simple("EinsumDense", (4, 5), "btd,ts->bsd", (3, 5), over_time={"bias_axes": "s"})
simple("EinsumDense", (4, 5), "btd,td->btd", (4, 5), entry_by_entry={"bias_axes": "td"})
simple("EinsumDense", (3, 4), "...x,xy->...y", (5,), ellipsis={"bias_axes": "y"})

# Convolutions -------------------------------------------------------------------------------------------------------

simple("Conv1D", (7, 3), 4, 3, bias={}, no_bias={"use_bias": False}, strides={"strides": 2, "padding": "same"})
simple("Conv1D", (7, 3), 4, 3, causal={"padding": "causal"}, dilated={"dilation_rate": 2},
       causal_dilated={"padding": "causal", "dilation_rate": 2})  # fmt: skip
simple("Conv1D", (6, 4), 6, 2, groups={"groups": 2})
simple("Conv2D", (5, 6, 3), 4, (3, 2), bias={}, no_bias={"use_bias": False, "padding": "same"},
       strides={"strides": (2, 1), "padding": "same"}, dilated={"dilation_rate": (2, 1)},
       dilated_same={"dilation_rate": 2, "padding": "same"})  # fmt: skip
simple(
    "Conv2D",
    (4, 4, 4),
    6,
    2,
    groups={"groups": 2},
    strided_groups={"groups": 2, "strides": 2, "padding": "same"},
    groups_without_bias={"groups": 2, "use_bias": False},
)
simple("Conv2D", (5, 4, 4), 8, 2, one_channel_a_group={"groups": 4, "strides": 2, "padding": "same"},
       one_channel_a_group_dilated={"groups": 4, "dilation_rate": 2},
       one_channel_a_group_uneven_strides={"groups": 4, "strides": (2, 1)})  # fmt: skip
simple("Conv2D", (3, 4, 3), 4, 1, one_by_one={}, one_by_one_strided={"strides": 2})
simple("Conv2D", (2, 2, 12), 10, 2, many_channels={})
simple(
    "Conv3D",
    (4, 4, 3, 2),
    3,
    2,
    bias={},
    no_bias={"use_bias": False},
    strides={"strides": (2, 1, 1), "padding": "same"},
)
simple("Conv3D", (4, 3, 3, 2), 4, (1, 2, 2), groups={"groups": 2}, dilated={"dilation_rate": (2, 1, 1)})
simple("DepthwiseConv1D", (7, 3), 3, bias={}, no_bias={"use_bias": False}, multiplier={"depth_multiplier": 2},
       strides={"strides": 2, "padding": "same"}, dilated={"dilation_rate": 2})  # fmt: skip
simple("DepthwiseConv2D", (5, 6, 3), 3, bias={}, no_bias={"use_bias": False}, multiplier={"depth_multiplier": 2},
       strides={"strides": 2, "padding": "same"}, dilated={"dilation_rate": 2})  # fmt: skip
simple("SeparableConv1D", (7, 3), 4, 3, bias={}, no_bias={"use_bias": False}, multiplier={"depth_multiplier": 2},
       strides={"strides": 2, "padding": "same"}, dilated={"dilation_rate": 2})  # fmt: skip
simple("SeparableConv2D", (5, 5, 3), 4, 2, bias={}, no_bias={"use_bias": False}, multiplier={"depth_multiplier": 2},
       strides={"strides": 2, "padding": "same"}, dilated={"dilation_rate": 2})  # fmt: skip
simple("Conv1DTranspose", (4, 3), 4, 3, bias={}, no_bias={"use_bias": False}, strides={"strides": 2, "padding": "same"},
       wide_strides={"strides": 4}, output_padding={"strides": 3, "output_padding": 2})  # fmt: skip
simple("Conv2DTranspose", (3, 2, 3), 4, 3, bias={}, no_bias={"use_bias": False},
       strides={"strides": (2, 1), "padding": "same"}, wide_strides={"strides": 4},
       output_padding={"strides": 2, "output_padding": 1, "padding": "same"})  # fmt: skip
simple("Conv3DTranspose", (2, 3, 2, 2), 3, 2, bias={}, no_bias={"use_bias": False},
       strides={"strides": (2, 1, 2), "padding": "same"},
       output_padding={"strides": 2, "output_padding": 1})  # fmt: skip

# Look-ups -----------------------------------------------------------------------------------------------------------

configure("Embedding", "small table", lambda: of_tokens(L.Embedding(5, 3), 4, 5))
configure("Embedding", "large table", lambda: of_tokens(L.Embedding(60, 2), 3, 60))
configure("Embedding", "mask", lambda: of_tokens(
    lambda i: L.GlobalAveragePooling1D()(L.Embedding(4, 3, mask_zero=True)(i)), 5, 4))  # fmt: skip


def _reversible(**kwargs: Any) -> tuple[Any, Any]:
    layer = L.ReversibleEmbedding(6, 3, **kwargs)
    return of_tokens(lambda i: layer(L.Activation("tanh")(layer(i)), reverse=True), 3, 6)


configure("ReversibleEmbedding", "tied", lambda: _reversible())
configure("ReversibleEmbedding", "not tied", lambda: _reversible(tie_weights=False))
configure("ReversibleEmbedding", "soft cap", lambda: _reversible(logit_soft_cap=2.0))
configure("ReversibleEmbedding", "look-up alone", lambda: of_tokens(L.ReversibleEmbedding(6, 3), 3, 6))

# Normalisation ------------------------------------------------------------------------------------------------------

simple("BatchNormalization", (4,), on_vectors={}, no_scale={"scale": False}, no_centre={"center": False})
simple("BatchNormalization", (3, 4, 2), on_images={}, on_rows={"axis": 1})
simple("LayerNormalization", (3, 4), last_axis={}, no_scale={"scale": False}, no_centre={"center": False},
       two_axes={"axis": (1, 2)}, over_time={"axis": 1})  # fmt: skip
simple("LayerNormalization", (4,), on_vectors={})
simple("GroupNormalization", (3, 3, 4), 2, on_images={}, no_scale={"scale": False}, no_centre={"center": False})
simple("GroupNormalization", (5, 4), one_group_a_channel={"groups": -1}, instance={"groups": 4})
simple("RMSNormalization", (3, 4), last_axis={}, two_axes={"axis": (1, 2)})
configure("SpectralNormalization", "dense", lambda: around(L.SpectralNormalization(L.Dense(5)), (4,)))
configure("SpectralNormalization", "convolution", lambda: around(L.SpectralNormalization(L.Conv2D(3, 2)), (4, 4, 2)))

# Activations, spectra, pipelines ------------------------------------------------------------------------------------

simple("PReLU", (3, 4), per_entry={}, shared_over_time={"shared_axes": [1]}, shared={"shared_axes": [1, 2]})
simple("PReLU", (2, 3, 2), shared_over_pixels={"shared_axes": [1, 2]})
simple("STFTSpectrogram", (16, 1), "magnitude", 8, 4, 8, magnitude={}, padded={"padding": "same"})
simple("STFTSpectrogram", (16, 2), "real", 8, 4, 8, real_part_of_two_channels={}, expanded={"expand_dims": True})
simple("STFTSpectrogram", (16, 1), "stft", 8, 4, 8, both_parts={})
configure("Pipeline", "two dense layers", lambda: around(L.Pipeline([L.Dense(3, "tanh"), L.Dense(2)]), (4,)))

# Recurrent ----------------------------------------------------------------------------------------------------------

STEPS = (3, 2)
for _layer in ("SimpleRNN", "LSTM", "GRU"):
    simple(_layer, STEPS, 3, last_step={}, sequences={"return_sequences": True}, no_bias={"use_bias": False},
           backwards={"go_backwards": True, "return_sequences": True}, unrolled={"unroll": True})  # fmt: skip

    def _masked(layer: str = _layer) -> tuple[Any, Any]:
        def call(i: Any) -> Any:
            return getattr(L, layer)(2)(getattr(L, layer)(3, return_sequences=True)(L.Masking(0.0)(i)))

        model, x = around(call, (4, 2))
        x[0, 2:] = 0
        return model, x

    def _with_state(layer: str = _layer) -> tuple[Any, Any]:
        return around(lambda i: getattr(L, layer)(2, return_state=True)(i), STEPS)

    def _given_state(layer: str = _layer) -> tuple[Any, Any]:
        states = 2 if layer == "LSTM" else 1
        return around(lambda i, *s: getattr(L, layer)(2)(i, initial_state=list(s)), STEPS, *[(2,)] * states)

    configure(_layer, "masked", _masked)
    configure(_layer, "states returned", _with_state)
    configure(_layer, "states given", _given_state)

    def _cell(cell: str = _layer + "Cell") -> tuple[Any, Any]:
        states = 2 if cell == "LSTMCell" else 1
        return around(lambda i, *s: getattr(L, cell)(3)(i, list(s))[0], (2,), *[(3,)] * states)

    def _cell_no_bias(cell: str = _layer + "Cell") -> tuple[Any, Any]:
        return around(L.RNN(getattr(L, cell)(2, use_bias=False)), STEPS)

    configure(_layer + "Cell", "one step", _cell)
    configure(_layer + "Cell", "in RNN, no bias", _cell_no_bias)

simple(
    "GRU", STEPS, 2, reset_before={"reset_after": False}, reset_before_no_bias={"reset_after": False, "use_bias": False}
)
configure("GRUCell", "reset before", lambda: around(L.RNN(L.GRUCell(2, reset_after=False)), STEPS))
simple("LSTM", STEPS, 2, hard_gates={"recurrent_activation": "hard_sigmoid", "unit_forget_bias": False})


def _bidirectional(layer: Any, shape: tuple[int, ...] = STEPS, **kwargs: Any) -> Build:
    return lambda: around(L.Bidirectional(layer(), **kwargs), shape)


for _mode in ("concat", "sum", "mul", "ave", None):
    configure("Bidirectional", f"merge {_mode}", _bidirectional(lambda: L.LSTM(2), merge_mode=_mode))
configure("Bidirectional", "sequences", _bidirectional(lambda: L.GRU(2, return_sequences=True)))
configure("Bidirectional", "two layers", lambda: around(
    L.Bidirectional(L.SimpleRNN(2), backward_layer=L.SimpleRNN(2, use_bias=False, go_backwards=True)),
    STEPS))  # fmt: skip
configure("RNN", "stacked cells", lambda: around(L.RNN([L.SimpleRNNCell(3), L.LSTMCell(2)]), STEPS))
configure("RNN", "sequences", lambda: around(L.RNN(L.GRUCell(2), return_sequences=True), STEPS))
configure("RNN", "backwards", lambda: around(L.RNN(L.SimpleRNNCell(2), go_backwards=True), STEPS))
configure(
    "StackedRNNCells", "in RNN", lambda: around(L.RNN(L.StackedRNNCells([L.GRUCell(2), L.SimpleRNNCell(3)])), STEPS)
)
configure("StackedRNNCells", "one step", lambda: around(
    lambda i, s, t: L.StackedRNNCells([L.SimpleRNNCell(2), L.GRUCell(3)])(i, [s, t])[0], (2,), (2,), (3,)))  # fmt: skip
for _rank, _shape in ((1, (2, 4, 2)), (2, (2, 3, 3, 1)), (3, (2, 2, 3, 2, 1))):
    simple(f"ConvLSTM{_rank}D", _shape, 2, 2, last_step={}, sequences={"return_sequences": True, "padding": "same"},
           no_bias={"use_bias": False, "strides": 2, "padding": "same"}, backwards={"go_backwards": True})  # fmt: skip
configure("TimeDistributed", "dense", lambda: around(L.TimeDistributed(L.Dense(4)), STEPS))
configure("TimeDistributed", "convolution", lambda: around(L.TimeDistributed(L.Conv2D(2, 2)), (2, 3, 3, 1)))
configure("TimeDistributed", "normalisation", lambda: around(L.TimeDistributed(L.LayerNormalization()), (3, 4)))

# Attention ----------------------------------------------------------------------------------------------------------


def _mask(x: Any) -> Any:
    """A mask over the keys, made from the data."""
    return keras.ops.abs(x[:, :, 0]) > 0.3


configure("Attention", "scale", lambda: around(lambda q, v: L.Attention(use_scale=True)([q, v]), (3, 4), (5, 4)))
configure("Attention", "concat score", lambda: around(
    lambda q, v: L.Attention(use_scale=True, score_mode="concat")([q, v]), (3, 4), (5, 4)))  # fmt: skip
configure(
    "Attention", "causal", lambda: around(lambda q: L.Attention(use_scale=True)([q, q], use_causal_mask=True), (3, 4))
)
configure("Attention", "masked", lambda: around(
    lambda q, v: L.Attention(use_scale=True)([q, v], mask=[None, _mask(v)]), (3, 4), (5, 4)))  # fmt: skip
configure("AdditiveAttention", "scale", lambda: around(lambda q, v: L.AdditiveAttention()([q, v]), (3, 4), (5, 4)))
configure(
    "AdditiveAttention", "causal", lambda: around(lambda q: L.AdditiveAttention()([q, q], use_causal_mask=True), (3, 4))
)


def _attention(
    layer: str, *args: Any, call: dict[str, Any] | None = None, shape: tuple[int, ...] = (3, 4), **kwargs: Any
) -> Build:
    return lambda: around(lambda i: getattr(L, layer)(*args, **kwargs)(i, i, **(call or {})), shape)


configure("MultiHeadAttention", "self", _attention("MultiHeadAttention", 2, 3))
configure("MultiHeadAttention", "no bias", _attention("MultiHeadAttention", 2, 3, use_bias=False))
configure("MultiHeadAttention", "causal", _attention("MultiHeadAttention", 2, 3, call={"use_causal_mask": True}))
configure("MultiHeadAttention", "one head", _attention("MultiHeadAttention", 1, 3, output_shape=2))
configure(
    "MultiHeadAttention", "on grids", _attention("MultiHeadAttention", 2, 2, shape=(2, 3, 3), attention_axes=(2,))
)
configure("MultiHeadAttention", "cross", lambda: around(L.MultiHeadAttention(2, 3, value_dim=2), (3, 4), (5, 2)))
configure("MultiHeadAttention", "keys apart", lambda: around(L.MultiHeadAttention(2, 3), (3, 4), (5, 2), (5, 3)))
configure("MultiHeadAttention", "masked", lambda: around(
    lambda q, v: L.MultiHeadAttention(2, 3)(q, v, attention_mask=_mask(v)[:, None, :]), (3, 4), (5, 2)))  # fmt: skip
if takes("MultiHeadAttention", "use_gate", "sliding_window"):
    configure("MultiHeadAttention", "gate", _attention("MultiHeadAttention", 2, 3, use_gate=True))
    configure("MultiHeadAttention", "sliding window", _attention("MultiHeadAttention", 2, 3, sliding_window=2))
configure("GroupQueryAttention", "self", _attention("GroupQueryAttention", 3, 4, 2))
configure("GroupQueryAttention", "no bias", _attention("GroupQueryAttention", 3, 2, 2, use_bias=False))
configure("GroupQueryAttention", "causal", _attention("GroupQueryAttention", 3, 4, 1, call={"use_causal_mask": True}))
configure("GroupQueryAttention", "cross", lambda: around(L.GroupQueryAttention(3, 4, 2), (3, 4), (5, 4)))
if takes("GroupQueryAttention", "use_gate"):
    configure("GroupQueryAttention", "gate", _attention("GroupQueryAttention", 3, 2, 1, use_gate=True))
