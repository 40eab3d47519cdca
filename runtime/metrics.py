"""Counters and histograms of an engine and its server, as Prometheus text; knows no HTTP.

Each EngineMetrics has its own registry, so two engines in one process do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine_stats import COUNTERS, GAUGES

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class EngineMetrics:
    """The metrics of one engine and the server before it.

    `read_stats` gives the engine's own counters when the metrics are read. A name it lacks is left
    out; a name that is in neither table above is not shown.
    """

    def __init__(self, read_stats: Callable[[], Mapping[str, float]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(read_stats))
        self.runs_active = Gauge(
            "umbel_runs_active", "runs that have not ended", registry=self.registry
        )
        self.runs = Counter(
            "umbel_runs", "runs by how they ended", ["outcome"], registry=self.registry
        )
        self.nodes = Counter(
            "umbel_nodes", "nodes by how they ended", ["outcome"], registry=self.registry
        )
        self.time_to_first_token = Histogram(
            "umbel_time_to_first_token_seconds",
            "from a run's arrival to its first text",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.run_seconds = Histogram(
            "umbel_run_seconds",
            "from a run's arrival to its last event",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )

    def render(self) -> bytes:
        """Return all metrics in Prometheus text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine's counters when asked, instead of counting a second time."""

    def __init__(self, read_stats: Callable[[], Mapping[str, float]]) -> None:
        self._read_stats = read_stats

    def collect(self) -> Iterable[Metric]:
        stats = self._read_stats()
        for name, text in COUNTERS.items():
            if name in stats:
                metric = name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
                yield CounterMetricFamily(f"umbel_engine_{metric}", text, value=stats[name])
        for name, text in GAUGES.items():
            if name in stats:
                yield GaugeMetricFamily(f"umbel_engine_{name}", text, value=stats[name])

    def describe(self) -> Iterable[Metric]:
        return ()  # else registering would read the engine
