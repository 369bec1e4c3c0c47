"""The gateway's own figures, each declared once with a sentence; ``/metrics`` prints them.

A figure that a user needs in order to notice a loss is a counter here; the reason is a label.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call]


class Meters:
    """One set of figures, made by ``app`` and handed to whoever counts."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "locum_requests_total",
            "Requests that were answered with success.",
            ["signal", "transport"],
            registry=registry,
        )
        self.accepted = Counter(
            "locum_accepted_points_total",
            "Data points, spans and log records that are on disk.",
            ["signal"],
            registry=registry,
        )
        self.refused = Counter(
            "locum_refused_requests_total",
            "Requests that were refused whole.",
            ["reason", "transport"],
            registry=registry,
        )
        self.left_out = Counter(
            "locum_left_out_points_total",
            "Data points, spans and records that were left out of an accepted request.",
            ["signal", "reason"],
            registry=registry,
        )
        self.changed = Counter(
            "locum_changed_total",
            "Attributes and texts that were cut, renamed or merged; counted once a series for metrics.",
            ["signal", "reason"],
            registry=registry,
        )
        self.answer_s = Histogram(
            "locum_answer_seconds",
            "From the last byte of a request to its answer.",
            ["transport"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
            registry=registry,
        )
        self.series = Gauge("locum_series", "Series that the registry knows.", registry=registry)
        self.series_passed = Counter(
            "locum_series_over_limit_total",
            "Data points of new series that passed the slow way because max_series was reached.",
            registry=registry,
        )
        self.buffered_bytes = Gauge("locum_buffer_bytes", "Bytes of the buffer on disk.", ["kind"], registry=registry)
        self.segments = Gauge("locum_buffer_segments", "Segments by state.", ["state"], registry=registry)
        self.quarantined = Counter(
            "locum_quarantined_total",
            "Records and files that were moved aside as damaged.",
            ["kind"],
            registry=registry,
        )
        self.pruned_points = Counter(
            "locum_pruned_points_total",
            "Points deleted by retention.",
            ["delivered", "reason"],
            registry=registry,
        )
        self.delivered = Counter(
            "locum_delivered_points_total",
            "Points that a sink's receiver took.",
            ["sink", "category"],
            registry=registry,
        )
        self.delivered_bytes = Counter(
            "locum_delivered_bytes_total",
            "Bytes of bodies as sent, compressed.",
            ["sink", "category"],
            registry=registry,
        )
        self.retries = Counter(
            "locum_retries_total",
            "Bodies that were sent again.",
            ["sink", "category", "cause"],
            registry=registry,
        )
        self.dead_letters = Counter(
            "locum_dead_letter_points_total",
            "Points that the receiver will not take.",
            ["sink", "category"],
            registry=registry,
        )
        self.sink_lag_batches = Gauge(
            "locum_sink_lag_batches",
            "Batches that are on disk and not yet delivered.",
            ["sink", "category"],
            registry=registry,
        )
        self.sink_lag_s = Gauge(
            "locum_sink_lag_seconds",
            "Age of the oldest batch that is not yet delivered.",
            ["sink", "category"],
            registry=registry,
        )
        self.commit_s = Histogram(
            "locum_commit_seconds",
            "Writing and syncing one group of batches.",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5),
            registry=registry,
        )
