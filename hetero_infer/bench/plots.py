"""The PNG of each benchmark, drawn from its JSON object; the only module that needs matplotlib."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

from planes.errors import ConfigError
from planes.extras import the_extra

DPI = 120
EXTRA = "bench"
RESERVED, USED = "tab:orange", "tab:blue"


def require_matplotlib() -> None:
    """Raise ConfigError, saying what to install, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"a plot needs matplotlib, of {the_extra(EXTRA)}", field="plot")


def draw_throughput(whole: dict[str, Any], file: Path) -> None:
    """Draw tokens a second over the number of streams, with every sample."""
    figure, axes = _figure(1)
    (plot,) = axes
    levels = [result["concurrency"] for result in whole["results"]]
    for key, label in (
        ("output_tokens_per_second", "output"),
        ("total_tokens_per_second", "prompt and output"),
    ):
        medians = [result["median"][key] for result in whole["results"]]
        (line,) = plot.plot(levels, medians, marker="o", label=f"{label}, median")
        for result in whole["results"]:
            values = [sample[key] for sample in result["samples"]]
            at = [result["concurrency"]] * len(values)
            plot.scatter(at, values, s=12, color=line.get_color(), alpha=0.5)
    plot.set_xscale("log", base=2)
    plot.set_xticks(levels, [str(level) for level in levels])
    plot.set(xlabel="streams at once", ylabel="tokens/s", ylim=(0, None))
    plot.legend()
    _save(figure, whole, file)


def draw_latency(whole: dict[str, Any], file: Path) -> None:
    """Draw what share of first tokens, and of gaps, came within which time."""
    figure, axes = _figure(2)
    for result in whole["results"]:
        level = result["concurrency"]
        label = f"{result['rate']:g} a second" if level is None else f"{level} at once"
        streams = [stream for sample in result["samples"] for stream in sample]
        first = [stream["arrivals_ms"][0] - stream["sent_ms"] for stream in streams]
        gaps = [
            after - before
            for stream in streams
            for before, after in itertools.pairwise(stream["arrivals_ms"])
        ]
        for plot, values in zip(axes, (first, gaps), strict=True):
            if values:
                plot.ecdf(values, label=label)
    for plot, title in zip(axes, ("time to the first token", "between tokens"), strict=True):
        plot.set(title=title, xlabel="ms", ylabel="share", xscale="log")
        if plot.has_data():
            plot.legend()
    _save(figure, whole, file)


def draw_neighbour(whole: dict[str, Any], file: Path) -> None:
    """Draw the rate of the stream alone and beside the neighbours, with every sample."""
    figure, axes = _figure(1)
    (plot,) = axes
    for name in ("alone", "beside"):
        key = f"{name}_tokens_per_second"
        plot.bar(name, whole[key], color=USED, alpha=0.6)
        plot.scatter([name] * len(whole["samples"]), [s[key] for s in whole["samples"]], s=12)
    plot.set(title=f"beside: {whole['slower_by']:.2f} × slower", ylabel="tokens/s of one stream")
    _save(figure, whole, file)


def draw_start(whole: dict[str, Any], file: Path) -> None:
    """Draw the time of each kind of start, with every sample."""
    figure, axes = _figure(1)
    (plot,) = axes
    for result in whole["results"]:
        name = result["what"].replace("_", "\n")
        plot.bar(name, result["median_s"], color=USED, alpha=0.6)
        plot.scatter([name] * len(result["samples_s"]), result["samples_s"], s=12)
    plot.set(ylabel="s", ylim=(0, None))
    _save(figure, whole, file)


def draw_link(whole: dict[str, Any], file: Path) -> None:
    """Draw the time with one and two batches under way, delays, and bytes of a row."""
    figure, axes = _figure(3)
    times, delays, rows = axes
    for figures in whole["depths"]:
        name = f"{figures['depth']} under way"
        times.bar(name, figures["median_s"], color=USED, alpha=0.6)
        times.scatter([name] * len(figures["samples_s"]), figures["samples_s"], s=12)
    times.set(title=f"{whole['streams']} streams", ylabel="s")
    ahead = whole["depths"][-1]
    for streams, figures in ((whole["streams"], ahead), (whole["many_streams"], whole["many"])):
        delays.bar(f"{streams} streams", 1e3 * figures["scheduling_delay_p99_s"], color=USED)
    delays.set(title="a result waits for the engine, p99", ylabel="ms")
    names = [f"context {row['context']}" for row in whole["rows"]]
    rows.bar(names, [row["bytes"] for row in whole["rows"]], color=USED)
    rows.set(title="a decode row on the wire", ylabel="bytes")
    _save(figure, whole, file)


def draw_memory(whole: dict[str, Any], file: Path) -> None:
    """Draw waste and concurrency of each kind of memory, and what runs over the steps."""
    figure, axes = _figure(3)
    waste, concurrency, running = axes
    results = whole["results"]
    methods = [result["method"] for result in results]
    waste.bar(methods, [100 * result["waste"] for result in results], color=RESERVED)
    waste.set(title="reserved, not used", ylabel="%")
    sustained = [result["sustained_concurrency"] for result in results]
    concurrency.bar(methods, sustained, color=USED)
    concurrency.set(title="requests at once, while others wait")
    for result in results:
        running.plot(result["running"], label=result["method"], linewidth=1)
    running.set(title="requests running", xlabel="step", ylim=(0, None))
    running.legend()
    _save(figure, whole, file)


def draw_kernels(whole: dict[str, Any], file: Path) -> None:
    """Draw the share of its roofline that each kernel reaches."""
    results = whole["results"]
    threads = sorted({result["threads"] for result in results})
    names = list(dict.fromkeys(result["name"] for result in results))
    figure, axes = _figure(1, height=1.5 + 0.22 * len(names))
    (plot,) = axes
    thickness = 0.8 / len(threads)
    for index, count in enumerate(threads):
        shares = {r["name"]: 100 * r["share"] for r in results if r["threads"] == count}
        places = [names.index(name) + index * thickness for name in shares]
        label = f"{count} thread" + ("s" if count > 1 else "")
        plot.barh(places, list(shares.values()), height=thickness, label=label)
    middle = (len(threads) - 1) / 2 * thickness
    plot.set_yticks([i + middle for i in range(len(names))], names, fontsize=7)
    plot.margins(y=0.01)
    plot.invert_yaxis()
    plot.axvline(100, color="black", linewidth=0.8)
    plot.set(xlabel="% of its roofline")
    plot.legend()
    _save(figure, whole, file)


def draw_accuracy(whole: dict[str, Any], file: Path) -> None:
    """Draw how far each format is from float32: perplexity, divergence, most likely tokens."""
    figure, axes = _figure(3)
    perplexity, divergence, tops = axes
    results = whole["results"]
    formats = [result["format"].replace(":", ":\n") for result in results]
    perplexity.bar(
        formats,
        [100 * (result["perplexity_ratio"] - 1) for result in results],
        yerr=[100 * result["perplexity_ratio_standard_error"] for result in results],
        capsize=4,
        color=USED,
    )
    perplexity.axhline(0, color="black", linewidth=0.8)
    perplexity.set(title="perplexity, beyond float32's, ± one standard error", ylabel="%")
    divergence.bar(formats, [result["mean_kl"] for result in results], color=USED)
    divergence.set(title="KL from float32, mean", ylabel="nats")
    tops.bar(formats, [100 * result["top_token_differs"] for result in results], color=USED)
    tops.set(title="another token is the most likely", ylabel="%")
    _save(figure, whole, file)


def _figure(num_plots: int, height: float = 4.0) -> tuple[Any, list[Any]]:
    """Return a figure without a window, and its plots in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 + 4.0 * num_plots, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, num_plots, squeeze=False)[0])


def _save(figure: Any, whole: dict[str, Any], file: Path) -> None:  # noqa: ANN401
    """Say on the figure what it is of, and write it."""
    machine = whole["machine"]
    model = whole.get("model")
    what = f", {model['model']} as {model['dtype']}" if model else ""
    commit = (whole["commit"] or "no commit")[:12] + ("+" if whole["tree_has_changes"] else "")
    figure.suptitle(
        f"{whole['benchmark']}{what}: {machine['usable_cpus']} CPUs of {machine['cpu']}, "
        f"{whole['date'][:10]}, {commit}",
        fontsize=8,
    )
    figure.savefig(file, format="png", dpi=DPI)
