"""The figures asked of netjac (docs: design, section 7), each beside the figure reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.cases import FACTORS, GRAM, GRAM_HELD, GROUND, GROWTH, LAYOUTS
from benchmarks.runner import Outcome, paired_ratio

Results = dict[str, list[Outcome]]


@dataclass(frozen=True)
class Figure:
    """One row: what, the figure asked, the figure reached, whether it is reached, and what it was reached against."""

    what: str
    asked: str
    reached: str
    met: bool | None
    against: str = ""


def _by_label(outcomes: Iterable[Outcome]) -> dict[str, Outcome]:
    return {outcome.contender.label: outcome for outcome in outcomes if outcome.timed}


def fastest(outcomes: Iterable[Outcome], keep: Callable[[Outcome], bool] = lambda _: True) -> Outcome | None:
    """The peer with the shortest median among those that have times."""
    timed = [o for o in outcomes if o.timed and o.contender.role == "peer" and keep(o)]
    return min(timed, key=lambda o: o.timing.median, default=None)


def _times(ratio: float) -> str:
    return f"{ratio:.3g} ×"


def _missing(what: str, asked: str, outcomes: list[Outcome]) -> Figure:
    reasons = sorted({o.status for o in outcomes if o.contender.role == "netjac" and not o.timed})
    return Figure(what, asked, "not measured", None, "; ".join(reasons) or "nothing to compare with")


def _layouts(outcomes: list[Outcome]) -> list[Figure]:
    what, asked = "dense J of {} MB, {}, fresh buffer, against filling it", "≤ 1.25 ×"
    named = _by_label(outcomes)
    fill = named.get("filling a buffer of that size")
    labels = [f"to_array({layout!r})" for layout in LAYOUTS] + ["nj.jacobian and to_array('(n l) m')"]
    figures = []
    for label in labels:
        if fill is None or label not in named:
            figures.append(_missing(what.format("≥ 100", label), asked, outcomes))
            continue
        ratio = paired_ratio(named[label].timing, fill.timing)
        megabytes = f"{(fill.held or 0) / 1e6:.0f}"
        against = f"filling: {fill.timing.median * 1e3:.1f} ms"
        figures.append(Figure(what.format(megabytes, label), asked, _times(ratio), ratio <= 1.25, against))
    return figures


def _dense(name: str, outcomes: list[Outcome]) -> list[Figure]:
    asked = "≥ 2 × faster"
    named = _by_label(outcomes)
    figures = []
    for kind, keep in (
        ("fastest peer, one array a weight", lambda o: "matrix" not in o.contender.label),
        ("fastest peer giving the matrix", lambda o: "matrix" in o.contender.label),
    ):
        what = f"dense J, {name}, against the {kind}"
        peer, ours = fastest(outcomes, keep), named.get("netjac, dense")
        if peer is None or ours is None:
            figures.append(_missing(what, asked, outcomes))
            continue
        ratio = paired_ratio(peer.timing, ours.timing)
        against = f"{peer.contender.label}, {peer.timing.median * 1e3:.3g} ms; netjac {ours.timing.median * 1e3:.3g} ms"
        for words, label in (
            ("merely filling that buffer", "filling a buffer of that size"),
            ("netjac with out= the same buffer", "netjac, dense, out= the same buffer"),
        ):
            if label in named:
                against += f"; {words}: {_times(paired_ratio(peer.timing, named[label].timing))}"
        figures.append(Figure(what, asked, _times(ratio), ratio >= 2, against))
    return figures


def _factored(outcomes: list[Outcome]) -> list[Figure]:
    what, asked = "factored J, 50-256-256-5, n=200, against the fastest peer's dense J: ", ("≥ 25 × faster", "≤ 1/30")
    peer, ours = fastest(outcomes), _by_label(outcomes).get("netjac, factored")
    if peer is None or ours is None:
        return [_missing(what + kind, figure, outcomes) for kind, figure in zip(("time", "memory"), asked, strict=True)]
    ratio = paired_ratio(peer.timing, ours.timing)
    figures = [Figure(what + "time", asked[0], _times(ratio), ratio >= 25, peer.contender.label)]
    needed, used = max(peer.peak or 0, peer.held or 0), max(ours.peak or 0, ours.held or 0)
    if needed and used:
        against = f"{used / 1e6:.1f} MB against {needed / 1e6:.1f} MB"
        figures.append(Figure(what + "memory", asked[1], f"1/{needed / used:.0f}", needed >= 30 * used, against))
    return figures


def _growth(network: str, outcomes: list[Outcome]) -> list[Figure]:
    named, figures = _by_label(outcomes), []
    for kind, yardstick in (
        ("netjac, factored", ""),
        ("netjac, dense", "filling a buffer of that size"),
        ("netjac, dense, out= the same buffer", "filling the same buffer"),
    ):
        if f"{kind}, n={GROWTH[0]}" not in {outcome.contender.label for outcome in outcomes}:
            continue
        for n in GROWTH[:-1]:
            what, asked = f"growth of time, {network}, {kind.removeprefix('netjac, ')}, n {n} → {4 * n}", "≤ 4.6 ×"
            small, large = named.get(f"{kind}, n={n}"), named.get(f"{kind}, n={4 * n}")
            if small is None or large is None:
                figures.append(_missing(what, asked, outcomes))
                continue
            ratio = paired_ratio(large.timing, small.timing)
            against = f"{small.timing.median * 1e3:.2f} ms → {large.timing.median * 1e3:.2f} ms"
            little, much = named.get(f"{yardstick}, n={n}"), named.get(f"{yardstick}, n={4 * n}")
            if little and much:
                against += f"; {yardstick} grows {_times(paired_ratio(much.timing, little.timing))}"
            figures.append(Figure(what, asked, _times(ratio), ratio <= 4.6, against))
    return figures


def _products(network: str, least: float, outcomes: list[Outcome]) -> list[Figure]:
    named, figures = _by_label(outcomes), []
    evaluation = named.get("netjac, factored")
    for symbol, kind in (("J v", "jvp"), ("Jᵀ u", "vjp")):
        what, asked = f"{symbol}, {network}, against TensorFlow's compiled {kind}", f"≥ {least:g} × faster"
        peer = fastest(outcomes, lambda o, kind=kind: f" {kind}" in o.contender.label)
        ours = named.get(f"netjac, {symbol}")
        if peer is None or ours is None:
            figures.append(_missing(what, asked, outcomes))
            continue
        ratio = paired_ratio(peer.timing, ours.timing)
        against = f"{peer.contender.label}, {peer.timing.median * 1e3:.3f} ms; netjac {ours.timing.median * 1e3:.3f} ms"
        saved = peer.timing.median - ours.timing.median
        if evaluation and saved > 0:
            against += f"; the factors pay for themselves after {evaluation.timing.median / saved:.1f} products"
        figures.append(Figure(what, asked, _times(ratio), ratio >= least, against))
    return figures


def _beside(ours: Outcome, peer: Outcome, others: Iterable[Outcome]) -> str:
    """Times of the two, and how many times as long as ours the others take."""
    text = f"{peer.contender.label}, {peer.timing.median * 1e3:.3g} ms; netjac {ours.timing.median * 1e3:.3g} ms"
    ratios = ((other, paired_ratio(other.timing, ours.timing)) for other in others if other is not peer)
    return "; ".join([text, *(f"{other.contender.label}, {_times(ratio)}" for other, ratio in ratios)])


def _gram(n: int, outcomes: list[Outcome]) -> list[Figure]:
    what = f"J Jᵀ, {GROUND}, n={n}, "
    return [_gram_time(what, n, outcomes), _gram_libraries(what, outcomes), _gram_memory(what, n, outcomes)]


def _explicit(outcome: Outcome) -> bool:
    return outcome.contender.label.startswith("dense J")


def _gram_time(what: str, n: int, outcomes: list[Outcome]) -> Figure:
    what, asked = what + "against dense J Jᵀ", "≥ 10 × faster" if n == 256 else ""
    peer, ours = fastest(outcomes, _explicit), _by_label(outcomes).get(GRAM.label)
    stopped = [o for o in outcomes if _explicit(o) and o.least]
    if ours is None or (peer is None and not stopped):
        return _missing(what, asked, outcomes)
    if peer:
        ratio, reached = paired_ratio(peer.timing, ours.timing), ""
        against = f"{peer.contender.label}, {peer.timing.median:.3g} s"
    else:  # a lower bound
        soonest = min(stopped, key=lambda o: o.least or 0)
        ratio, reached = (soonest.least or 0) / ours.timing.median, "> "
        against = f"{soonest.contender.label}, {soonest.status}"
    against += f"; netjac {ours.timing.median * 1e3:.3g} ms"
    return Figure(what, asked, reached + _times(ratio), ratio >= 10 if asked else None, against)


def _gram_libraries(what: str, outcomes: list[Outcome]) -> Figure:
    """Those that do not form J."""
    what += "against the fastest library"
    peers = [o for o in outcomes if o.timed and o.contender.role == "peer" and not _explicit(o)]
    peer, ours = fastest(peers), _by_label(outcomes).get(GRAM.label)
    if peer is None or ours is None:
        return _missing(what, "", outcomes)
    return Figure(what, "", _times(paired_ratio(peer.timing, ours.timing)), None, _beside(ours, peer, peers))


def _gram_memory(what: str, n: int, outcomes: list[Outcome]) -> Figure:
    """Of the product alone; the factors, which are there before it, and the two together are said beside it."""
    what, asked = what + "memory of a call, over the result", "≤ 10 %" if n == 256 else ""
    named = _by_label(outcomes)
    ours, whole, factors = (named.get(kind.label) for kind in (GRAM_HELD, GRAM, FACTORS))
    if ours is None or not ours.peak or not ours.held:
        return _missing(what, asked, outcomes)
    over = ours.peak / ours.held - 1
    against = f"{ours.peak / 1e6:.1f} MB for {ours.held / 1e6:.1f} MB"
    if factors and factors.held:
        against += f"; the factors hold {factors.held / 1e6:.1f} MB"
    if whole and whole.peak:
        against += f"; nj.jacobian and J Jᵀ together grow by {whole.peak / 1e6:.1f} MB"
    return Figure(what, asked, f"{100 * over:.1f} %", over <= 0.1 if asked else None, against)


def _tangent(n: int, outcomes: list[Outcome]) -> list[Figure]:
    figures = []
    for work in dict.fromkeys(outcome.contender.work for outcome in outcomes):
        these = [outcome for outcome in outcomes if outcome.contender.work == work]
        if len(these) == 1:  # the evaluation of the factors
            continue
        what = f"{work}, {GROUND}, n={n}, against the fastest peer"
        peer, ours = fastest(these), _by_label(these).get(f"netjac: {work}")
        if peer is None or ours is None:
            figures.append(_missing(what, "", these))
            continue
        peers = [o for o in these if o.timed and o.contender.role == "peer"]
        against = _beside(ours, peer, peers).replace(f": {work}", "")
        figures.append(Figure(what, "", _times(paired_ratio(peer.timing, ours.timing)), None, against))
    return figures


def _fit(outcomes: list[Outcome]) -> list[Figure]:
    what, asked = "residual + Jacobian, 1-20-1, n=100, against one compiled forward call", "≤ 2 ×"
    named = _by_label(outcomes)
    forward, ours = named.get("TensorFlow forward call"), named.get("netjac, residual and Jacobian")
    if forward is None or ours is None:
        return [_missing(what, asked, outcomes)]
    ratio = paired_ratio(ours.timing, forward.timing)
    against = f"{ours.timing.median * 1e6:.0f} µs against {forward.timing.median * 1e6:.0f} µs"
    return [Figure(what, asked, _times(ratio), ratio <= 2, against)]


def _first(network: str, outcomes: list[Outcome]) -> list[Figure]:
    what, asked = f"first call (trace + probe), {network}, fresh process", "≤ 5 s"
    ours = _by_label(outcomes).get("netjac, factored")
    if ours is None:
        return [_missing(what, asked, outcomes)]
    seconds, peer = ours.timing.median, fastest(outcomes)
    against = f"{peer.contender.label}, not probed: {peer.timing.median:.2f} s" if peer else ""
    return [Figure(what, asked, f"{seconds:.2f} s", seconds <= 5, against)]


def figures(results: Results) -> list[Figure]:
    """Every figure that the cases that ran allow."""
    rows: list[Figure] = []
    for name, function in (
        ("layouts", _layouts),
        *((name, lambda o, name=name: _dense(name, o)) for name in JACOBIANS),
        ("mlp-256-n200", _factored),
        ("growth-64", lambda o: _growth("10-64-32-2", o)),
        ("growth-256", lambda o: _growth("50-256-256-5", o)),
        ("products-256", lambda o: _products("50-256-256-5, n=200", 2, o)),
        ("products-32", lambda o: _products("10-32-32-2, n=100", 10, o)),
        *((f"gram-n{n}", lambda o, n=n: _gram(n, o)) for n in (64, 256, 1024)),
        *((f"tangent-n{n}", lambda o, n=n: _tangent(n, o)) for n in (64, 256, 1024)),
        ("fit-20", _fit),
        ("first-dense", lambda o: _first("ten Dense layers", o)),
        ("first-mixed", lambda o: _first("ten layers of nine kinds", o)),
    ):
        if name in results:
            rows += function(results[name])
    return rows


JACOBIANS = ("mlp-64-n100", "mlp-64-n1000", "mlp-256-n200", "mlp-256-n2000", "cnn", "transformer")
