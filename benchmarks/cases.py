"""The cases: which contenders are timed beside each other, on which network."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.runner import Case, Contender

LAYOUTS = ("(n l) m", "(l n) m", "(n m) l", "(l m) n", "m (n l)", "(m l) n")
ONEDNN_OFF = ("TF_ENABLE_ONEDNN_OPTS", "0")
GROWTH = (1000, 4000, 16000)

FACTORED = Contender("netjac, factored", "netjac", "netjac_contenders", "factored", dense=False)
DENSE = Contender("netjac, dense", "netjac", "netjac_contenders", "dense")
FILL = Contender("filling a buffer of that size", "yardstick", "plain", "fill")

# TensorFlow and XLA keep the memory of a result that was let go and write the next one there, which spares the system
# handing it out anew, often the larger part of the time. These two do the same.
DENSE_AGAIN = Contender("netjac, dense, out= the same buffer", "netjac", "netjac_contenders", "dense-again")
FILL_AGAIN = Contender("filling the same buffer", "yardstick", "plain", "fill-again")

# Peers give one array a weight, (n, l, *shape), which is less work than the matrix (n·l, m); "matrix" adds that step.
PEERS = (
    Contender("tape.jacobian", "peer", "tensorflow_peers", "tape"),
    Contender("vectorized_map", "peer", "tensorflow_peers", "vectorized"),
    Contender("vectorized_map of tape.jacobian", "peer", "tensorflow_peers", "vectorized-nested"),
    Contender("vectorized_map of tape.jacobian, matrix", "peer", "tensorflow_peers", "vectorized-nested-matrix"),
    Contender("vectorized_map, XLA", "peer", "tensorflow_peers", "xla"),
    Contender("vectorized_map, XLA, matrix", "peer", "tensorflow_peers", "xla-matrix"),
    Contender("torch.func", "peer", "torch_peers", "jacobian"),
    Contender("torch.func, matrix", "peer", "torch_peers", "jacobian-matrix"),
    Contender("JAX jit", "peer", "jax_peers", "jacobian"),
    Contender("JAX jit, matrix", "peer", "jax_peers", "jacobian-matrix"),
)

PRODUCTS = (
    Contender("netjac, J v", "netjac", "netjac_contenders", "jvp", dense=False),
    Contender("netjac, Jᵀ u", "netjac", "netjac_contenders", "vjp", dense=False),
    FACTORED,
    Contender("TensorFlow jvp, forward", "peer", "tensorflow_peers", "jvp-forward", dense=False),
    Contender("TensorFlow jvp, two reverse passes", "peer", "tensorflow_peers", "jvp-twice", dense=False),
    Contender("TensorFlow jvp, forward, XLA", "peer", "tensorflow_peers", "jvp-forward-xla", dense=False),
    Contender("TensorFlow jvp, two reverse passes, XLA", "peer", "tensorflow_peers", "jvp-twice-xla", dense=False),
    Contender("TensorFlow vjp", "peer", "tensorflow_peers", "vjp", dense=False),
    Contender("TensorFlow vjp, XLA", "peer", "tensorflow_peers", "vjp-xla", dense=False),
    Contender("torch.func jvp", "other framework", "torch_peers", "jvp", dense=False),
    Contender("torch.func vjp", "other framework", "torch_peers", "vjp", dense=False),
    Contender("JAX jvp", "other framework", "jax_peers", "jvp", dense=False),
    Contender("JAX vjp", "other framework", "jax_peers", "vjp", dense=False),
)


# J Jᵀ of a network whose J is out of reach at n = 1024 (76 GB), and products with that J. Some give J Jᵀ from J itself,
# formed some samples at a time; their work grows with n² m, 1.5 TFLOP at n = 64.
GROUND = "784-1024-1024-10"
GRAM = Contender("netjac, nj.jacobian and J Jᵀ", "netjac", "netjac_contenders", "gram", dense=False)
GRAM_HELD = Contender(
    "netjac, J Jᵀ of a Jacobian that is there", "netjac", "netjac_contenders", "gram-held", dense=False
)
FACTORS = Contender("netjac, factored", "netjac", "netjac_contenders", "factors", dense=False)
NNGEOMETRY = Contender("NNGeometry", "peer", "torch_libraries", "nngeometry-gram", dense=False)
STRUCTURED = Contender(
    "neural-tangents, structured derivatives", "peer", "tangents_peers", "structured-derivatives", dense=False
)
EXPLICIT = tuple(
    Contender(label, "peer", module, name, dense=False)  # slow, and so gone before the next takes memory
    for label, module, name in (
        ("dense J in tiles, torch.func", "torch_peers", "gram"),
        ("dense J in tiles, JAX", "jax_peers", "gram"),
        ("dense J by layers, BackPACK", "torch_libraries", "backpack-gram"),
        ("dense J in tiles, NetKet", "netket_peers", "gram"),
        ("dense J, neural-tangents, Jacobian contraction", "tangents_peers", "jacobian-contraction"),
        ("dense J in tiles, TensorFlow", "tensorflow_peers", "gram"),  # last: the fastest, and it keeps its memory
    )
)
COLUMNWISE = (
    Contender("neural-tangents, NTK-vector products", "peer", "tangents_peers", "vector-products", dense=False),
    Contender("curvlinops, J (Jᵀ I)", "peer", "torch_libraries", "curvlinops-gram", dense=False),
)

TANGENT = (
    replace(FACTORS, work="J"),
    *(
        Contender(f"{label}: {work}", role, module, name, dense=False, work=work)
        for work, rows in {
            "J v": (
                ("netjac", "netjac", "netjac_contenders", "jvp"),
                ("TensorFlow, forward", "peer", "tensorflow_peers", "jvp-forward"),
                ("TensorFlow, forward, XLA", "peer", "tensorflow_peers", "jvp-forward-xla"),
                ("TensorFlow, two reverse passes, XLA", "peer", "tensorflow_peers", "jvp-twice-xla"),
                ("torch.func", "peer", "torch_peers", "jvp"),
                ("torch.func, linearised before", "peer", "torch_peers", "jvp-held"),
                ("JAX", "peer", "jax_peers", "jvp"),
                ("JAX, linearised before", "peer", "jax_peers", "jvp-held"),
                ("curvlinops", "peer", "torch_libraries", "curvlinops-jvp"),
                ("BackPACK, graph kept", "peer", "torch_libraries", "backpack-jvp"),
            ),
            "Jᵀ u": (
                ("netjac", "netjac", "netjac_contenders", "vjp"),
                ("TensorFlow", "peer", "tensorflow_peers", "vjp"),
                ("TensorFlow, XLA", "peer", "tensorflow_peers", "vjp-xla"),
                ("torch.func", "peer", "torch_peers", "vjp"),
                ("torch.func, forward pass before", "peer", "torch_peers", "vjp-held"),
                ("JAX", "peer", "jax_peers", "vjp"),
                ("JAX, forward pass before", "peer", "jax_peers", "vjp-held"),
                ("curvlinops", "peer", "torch_libraries", "curvlinops-vjp"),
                ("BackPACK, graph kept", "peer", "torch_libraries", "backpack-vjp"),
            ),
            "J Jᵀ u": (
                ("netjac", "netjac", "netjac_contenders", "kernel"),
                ("torch.func", "peer", "torch_peers", "kernel"),
                ("JAX", "peer", "jax_peers", "kernel"),
                ("curvlinops", "peer", "torch_libraries", "curvlinops-kernel"),
                ("neural-tangents", "peer", "tangents_peers", "kernel"),
            ),
            "Jᵀ J v": (
                ("netjac", "netjac", "netjac_contenders", "normal"),
                ("torch.func", "peer", "torch_peers", "normal"),
                ("JAX", "peer", "jax_peers", "normal"),
                ("curvlinops", "peer", "torch_libraries", "curvlinops-normal"),
                ("BackPACK, graph kept", "peer", "torch_libraries", "backpack-normal"),
                ("NetKet, centred", "peer", "netket_peers", "centred"),
            ),
        }.items()
        for label, role, module, name in rows
    ),
)


# TensorFlow 2.21 with its oneDNN kernels crashes (SIGSEGV) in vectorized_map over attention; without them it works.
WITHOUT_ONEDNN = tuple(
    replace(peer, label=f"{peer.label}, no oneDNN", environment=(ONEDNN_OFF,))
    for peer in PEERS
    if peer.name.startswith("vectorized")
)


def _jacobian(name: str, network: str, n: int, more: tuple[Contender, ...] = ()) -> Case:
    return Case(
        name,
        f"the whole Jacobian, {network}, n={n}",
        network,
        n,
        (FACTORED, DENSE, DENSE_AGAIN, *PEERS, *more, FILL, FILL_AGAIN),
    )


def _layouts(network: str, n: int) -> Case:
    held = Contender("", "netjac", "netjac_contenders", "dense-held")
    layouts = tuple(replace(held, label=f"to_array({layout!r})", layout=layout) for layout in LAYOUTS)
    whole = replace(DENSE, label="nj.jacobian and to_array('(n l) m')")
    title = f"dense layouts of a Jacobian that is there, {network}, n={n}"
    return Case("layouts", title, network, n, (FILL, *layouts, whole))


def _growth(name: str, network: str, dense: bool) -> Case:
    kinds = (FACTORED, DENSE, FILL, DENSE_AGAIN, FILL_AGAIN) if dense else (FACTORED,)
    contenders = tuple(replace(kind, label=f"{kind.label}, n={n}", n=n) for kind in kinds for n in GROWTH)
    return Case(name, f"growth with n, {network}", network, GROWTH[0], contenders)


def _products(name: str, network: str, n: int) -> Case:
    return Case(name, f"products with J, {network}, n={n}", network, n, PRODUCTS, reference="products")


def _gram(n: int, *peers: Contender) -> Case:
    contenders = (GRAM, GRAM_HELD, FACTORS, NNGEOMETRY, STRUCTURED, *peers)
    return Case(f"gram-n{n}", f"J Jᵀ, {GROUND}, n={n}", GROUND, n, contenders, reference="gram", compared=16)


def _tangent(n: int) -> Case:
    return Case(f"tangent-n{n}", f"products with J, {GROUND}, n={n}", GROUND, n, TANGENT, reference="tangent")


def _first(name: str, network: str) -> Case:
    peer = Contender(
        "vectorized_map, no oneDNN", "peer", "tensorflow_peers", "vectorized-nested", environment=(ONEDNN_OFF,)
    )
    contenders = (FACTORED, DENSE, peer)
    return Case(name, f"first call in a fresh process, {network}, n=32", network, 32, contenders, fresh=3)


FIT = (
    Contender("netjac, residual and Jacobian", "netjac", "netjac_contenders", "fit"),
    Contender("TensorFlow forward call", "yardstick", "tensorflow_peers", "forward"),
    FACTORED,
    Contender("vectorized_map, matrix", "peer", "tensorflow_peers", "vectorized-matrix"),
    Contender("vectorized_map, XLA, matrix", "peer", "tensorflow_peers", "xla-matrix"),
)

CASES: tuple[Case, ...] = (
    _jacobian("mlp-64-n100", "10-64-32-2", 100),
    _jacobian("mlp-64-n1000", "10-64-32-2", 1000),
    _jacobian("mlp-256-n200", "50-256-256-5", 200),
    _jacobian("mlp-256-n2000", "50-256-256-5", 2000),
    _jacobian("cnn", "cnn", 64),
    _jacobian("transformer", "transformer", 64, WITHOUT_ONEDNN),
    _layouts("50-256-256-5", 200),
    _growth("growth-64", "10-64-32-2", dense=True),
    _growth("growth-256", "50-256-256-5", dense=False),
    _products("products-256", "50-256-256-5", 200),
    _products("products-64", "10-64-32-2", 100),
    _products("products-32", "10-32-32-2", 100),
    _gram(64, *COLUMNWISE, *EXPLICIT),
    _gram(256, replace(EXPLICIT[-1], patience=5.0)),
    _gram(1024),
    *(_tangent(n) for n in (64, 256, 1024)),
    Case("fit-20", "residual and Jacobian at a new θ, 1-20-1, n=100", "1-20-1", 100, FIT),
    _first("first-dense", "ten-dense"),
    _first("first-mixed", "ten-mixed"),
)
QUICK = ("mlp-64-n100", "transformer", "products-32", "fit-20", "first-dense")
